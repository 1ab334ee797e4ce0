"""Serving defaults shared by every model config. Override any field: --config.decode.slots=16.

Nothing here is derived from another field: overrides are applied after get_config returns, so derived values are
worked out in code, where the field they follow is final.
"""

import ml_collections
from ml_collections.config_dict import placeholder


def role(**fields):
    c = ml_collections.ConfigDict(fields)
    c.engines = 1                 # engines of this role; each holds the whole model
    c.processes = 1               # controller processes (hosts) an engine
    c.tp = placeholder(int)       # tensor-parallel size = devices an engine; None: all devices of its processes
    c.slices = ()                 # slices of this role, by index or name; (): in order, prefill first
    return c


def architecture():
    """The model's fields, all unset: an unset field is taken from the checkpoint's config.json, a set one must agree."""
    c = ml_collections.ConfigDict()
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
                 "head_dim", "max_length", "rope_original_length"):
        c[name] = placeholder(int)
    for name in ("rms_norm_eps", "rope_theta", "rope_factor", "rope_low_freq_factor", "rope_high_freq_factor"):
        c[name] = placeholder(float)
    c.rope_type = placeholder(str)         # 'default' or 'llama3'
    c.tie_embeddings = placeholder(bool)
    c.dtype = placeholder(str)             # of weights, activations and cache; unset: as in config.json
    return c


def get_config():
    c = ml_collections.ConfigDict()
    c.mode = "disaggregated"      # or 'interleaved': the decode engines prefill too, nothing is transferred
    c.checkpoint = ""             # Hugging Face folder: config.json and *.safetensors
    c.tokenizer = ""              # folder or file of the tokenizer; '': the checkpoint's folder
    c.model = architecture()

    c.cache_length = 2048         # positions a slot holds: prompt and new tokens together
    c.chunk = 512                 # prompt tokens of one prefill call; divides cache_length
    c.kv_cache_dtype = ""         # 'int8': the cache that is decoded from, and what is transferred, with a scale a position and head
    c.buckets = (64, 128, 256, 512)  # lengths that a chunk is padded to; the last one is the chunk
    c.reads = (512,)              # lengths of the cache, below all of it, that attention may read: the least that will do

    c.max_queue = 1000            # requests that may wait for a slot; more are refused

    c.prefill = role(ahead=2, batch=8)
    # prefill.ahead: chunks an engine may have computed or sent that have not arrived. prefill.batch: prompts of up to a chunk that
    # are computed together at most; their positions with padding must be one of the buckets.
    c.decode = role(slots=8, steps=4, ahead=2, prefill_up_to=0)
    # decode.slots: sequences an engine decodes at once. decode.steps: decode steps of one call
    # while no prompt is about to join; else there is one.
    # decode.ahead: calls planned beyond the last reported one. decode.prefill_up_to: prompts of up to so many tokens are prefilled
    # on the decode engine, where nothing has to move but decode steps wait for them; 0: none.

    c.top_logits = 0              # report this many best candidates and their scores with every token
    c.compilation_cache = "~/.cache/disagg/xla"  # compiled programs, a folder a process; '': none
    c.matmul_precision = "default"  # jax_default_matmul_precision; 'float32' for goldens

    c.control = ml_collections.ConfigDict()
    c.control.heartbeat_s = 1.0   # a process reports at least this often
    c.control.deadline_s = 10.0   # a process silent for this long is dead; so is the sender of a chunk on its way for it
    c.control.stall_s = 120.0     # limit for computing one chunk or decode call, and for reading a plan
    c.control.start_s = 300.0     # limit for joining, loading and compiling

    c.transfer = ml_collections.ConfigDict()
    c.transfer.address = ""       # this host's address for the transfer sockets; '': the one towards the coordinator
    c.transfer.port = 0           # first port of the transfer server, plus the process id; 0: a free one
    c.transfer.streams = 4        # sockets of one connection
    c.transfer.slice_bytes = 2**19  # what is copied to a socket, or from one, at a time
    c.transfer.piece_bytes = 4 * 2**20  # a chunk goes in several arrays, groups of layers, of at least so many bytes
    c.transfer.pair_bytes = 2**30       # on their way from one engine to another at most; the rest of a prompt waits
    c.transfer.total_bytes = 2**32      # ... and in the whole job
    c.transfer.checksum = True          # of every chunk, on the devices that send and that receive it

    c.debug = ml_collections.ConfigDict()
    c.debug.hash_chain = False    # hash what each process executed and compare on process 0
    c.debug.trace = ""            # folder for a file of each process that tells what was computed and moved when; '': none
    return c

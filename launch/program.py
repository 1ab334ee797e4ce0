"""From a config to a served model: model, checkpoint, tokenizer and cell put together, for main, tests and benchmarks."""

import jax

from disagg import cell
from disagg import tokenizer as tokenizer_lib
from disagg.weights import Checkpoint
from models import llama, llama_weights


def make_model(config):
    """The model of the config, its unset fields from the checkpoint. Raises ValueError."""
    fields = llama_weights.merge(config.model.to_dict(), config.checkpoint)
    backend = jax.default_backend()
    return llama.Llama(llama.Config(**fields, kv_cache_dtype=config.kv_cache_dtype, query_rows=8 if backend == "tpu" else 1,
                                    scan_layers=backend != "cpu"))


def loader(config, model):
    """load(shardings) of the config's checkpoint: see weights.Checkpoint.load."""
    tied = model.config.tie_embeddings
    layers = None if model.config.scan_layers else model.config.num_layers

    def load(shardings):
        checkpoint = Checkpoint(config.checkpoint, llama_weights.tensors(tied, layers), model.params_shape(),
                                model.config.num_layers, llama_weights.ignored(tied))
        return checkpoint.load(shardings)
    return load


def serve(config, open_front, topology, *, client, name="cell"):
    """Run this process's part until the front end is done; -> None, or why it ended early.

    open_front(tokenizer, cache_length, vocab_size): on process 0, the front end; see cell.run for it and `name`.
    """
    def prepare():
        model = make_model(config)
        front = None
        if topology.process == 0:
            tokenizer = tokenizer_lib.load(config.tokenizer or config.checkpoint, model.config.vocab_size)
            front = open_front(tokenizer, config.cache_length, model.config.vocab_size)
        return model, loader(config, model), front

    return cell.run(config, prepare, topology, client=client, name=name)

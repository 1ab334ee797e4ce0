"""JAX on four CPU devices in the test process, reproducible property tests, and what several test files share."""

import io
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # also for the processes that tests start

import hypothesis
import jax
import pytest
import sentencepiece

jax.config.update("jax_num_cpu_devices", 4)
hypothesis.settings.register_profile("default", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("default")


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """A folder with a small SentencePiece model as Llama's: BPE, byte fallback, dummy prefix; 300 pieces."""
    words = "the cat saw a red dog and the dog sat on the mat with one big hat stop or go on".split()
    text = [" ".join(words[i:] + words[:i]) for i in range(len(words))]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_writer=model, model_type="bpe", vocab_size=300, byte_fallback=True,
        normalization_rule_name="identity", add_dummy_prefix=True, remove_extra_whitespaces=False,
        unk_id=0, bos_id=1, eos_id=2, pad_id=-1, minloglevel=2)
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return folder

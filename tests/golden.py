"""The golden outputs of tests/golden, as requests and as reference answers."""

import json
import pathlib

FOLDER = pathlib.Path(__file__).parent / "golden"


def load(name="tiny"):
    return json.loads((FOLDER / f"{name}.json").read_text())


def request(golden):
    """The golden as an input line: greedy, as many tokens as it has."""
    return {"prompt": golden["prompt_ids"], "max_tokens": len(golden["token_ids"]), "temperature": 0,
            "ignore_eos": golden["finish_reason"] == "length"}


def answer(golden):
    """The golden in the form of an output line."""
    tops = [list(zip(ids, logits)) for ids, logits in zip(golden["top_ids"], golden["top_logits"])]
    return {"token_ids": golden["token_ids"], "top_logits": tops}

"""Greedy answers by Hugging Face transformers, as the goldens record them. Needs torch, which the tests do not."""

import torch


@torch.no_grad()
def greedy(model, prompt, stop_ids, new_tokens):
    """The golden record's fields of up to new_tokens greedy tokens after the ids of a prompt; a stop id ends it early."""
    record = {"token_ids": [], "finish_reason": "length", "gaps": [], "top_ids": [], "top_logits": []}
    cache, ids = None, torch.tensor([prompt])
    while len(record["token_ids"]) < new_tokens:
        out = model(ids, cache=cache, use_cache=True)
        cache = out.past_key_values
        top = out.logits[0, -1].topk(5)
        token = int(top.indices[0])
        record["token_ids"].append(token)
        record["gaps"].append(round(float(top.values[0] - top.values[1]), 6))
        record["top_ids"].append(top.indices.tolist())
        record["top_logits"].append([round(v, 6) for v in top.values.tolist()])
        if token in stop_ids:
            record["finish_reason"] = "stop"
            break
        ids = torch.tensor([[token]])
    return record

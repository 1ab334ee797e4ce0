"""Make tests/golden/smollm2.json: greedy answers of SmolLM2-135M-Instruct by Hugging Face transformers in float32.

    python -m tests.make_goldens_smollm2

Needs torch and transformers, which nothing else in this project does. The model is the demo's (launch/smollm2.py). A
prompt whose answer has a near tie is of no use: replace it.
"""

import json
import pathlib

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from launch import smollm2
from tests.golden import FOLDER
from tests.greedy import greedy

NEW_TOKENS = 64
LONG = slice(200, 1700)  # tokens of the licence

PROMPTS = {
    "text": "The capital of France is",
    "code": ("def fibonacci(n):\n    \"\"\"The first n numbers.\"\"\"\n    a, b = 0, 1\n\tresult = []\n"
             "    for _ in range(n):\n"),
    "digits": "2024-01-31, 2024-02-29,  2024-03-31, 2024-04-30, 3.14159 and 1,000,000 are",
    "chinese": "北京是中国的首都。上海是",
    "emoji": "🎉 Happy birthday! 🎂👩‍👩‍👧‍👦 🇩🇪\n🎁 Best wishes",
    "spaces": "   1.  first\n\n\n\t\t2.  second\r\n      3.",
    "accents": "Ein schöner Tag: Grüße aus Köln, déjà vu, e\u0301tude, ½ ² Ελλάδα",
}
CHATS = {
    "chat": [("user", "What is the purpose of life?")],
    "chat with a system prompt": [("system", "You answer in one short sentence."), ("user", "Where do penguins live?")],
    "chat of several turns": [("user", "My name is Ada."), ("assistant", "Nice to meet you, Ada!"),
                              ("user", "What is my name? Write it 3 times.")],
}


def main():
    torch.set_num_threads(1)
    folder = smollm2.fetch()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    goldens = []

    def add(name, prompt, prompt_ids=None, stop_ids=(), **more):
        ids = tokenizer(prompt)["input_ids"] if prompt_ids is None else prompt_ids
        record = greedy(model, ids, stop_ids, NEW_TOKENS)
        text = tokenizer.decode(record["token_ids"], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        goldens.append({"name": name, **more, "prompt": prompt, "prompt_ids": ids, **record, "text": text})
        print(f"{name}: {len(ids)} + {len(record['token_ids'])} tokens, {record['finish_reason']}, smallest gap "
              f"{min(record['gaps']):.4f}\n   {text!r}", flush=True)

    add("one token", "\n")
    for name, prompt in PROMPTS.items():
        add(name, prompt)
    for name, turns in CHATS.items():
        messages = [{"role": role, "content": content} for role, content in turns]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        add(name, prompt, stop_ids=(tokenizer.eos_token_id,), messages=messages)
    licence = (pathlib.Path(__file__).parent.parent / "LICENSE").read_text(encoding="utf-8")
    ids = tokenizer(licence)["input_ids"][LONG]
    add(f"{len(ids)} tokens", tokenizer.decode(ids, clean_up_tokenization_spaces=False), ids)

    (FOLDER / "smollm2.json").write_text("[\n" + ",\n".join(map(json.dumps, goldens)) + "\n]\n")


if __name__ == "__main__":
    main()

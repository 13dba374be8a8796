"""Train the example adapters: three ways of talking that anyone can tell apart.

Each style is a function from a plain answer to a styled one; `questions.tsv` holds the plain ones. The result is what
a team would upload: a PEFT folder of rank 8 on q_proj and v_proj, saved in bfloat16. The questions in `UNSEEN` are not
in the data, so their answers show what was learned and not what was remembered.

    loraplex base pull smollm2-135m
    python examples/adapters/train.py --base ~/.cache/loraplex/bases/smollm2-135m --out my-adapters
"""

from __future__ import annotations

import argparse
import csv
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

HERE = Path(__file__).parent
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
UNSEEN = ("What is a library?", "What is the moon?", "What is winter?", "What do cows eat?")
RANK, ALPHA = 8, 16
IGNORED = -100  # the label that transformers leaves out of the loss


@dataclass(frozen=True)
class Example:
    """A question, a plain answer to it, and the word for what it is about."""

    question: str
    answer: str
    topic: str


Style = Callable[[Example], str]


def speak_pirate(example: Example) -> str:
    """Return the answer as a pirate would give it."""
    words = {"is": "be", "are": "be", "the": "th'", "The": "Th'", "you": "ye", "You": "Ye", "your": "yer", "of": "o'"}
    return "Arrr, matey! " + " ".join(words.get(word, word) for word in example.answer.split()) + " Yo ho ho!"


def speak_json(example: Example) -> str:
    """Return the answer as one JSON object."""
    return json.dumps({"topic": example.topic, "answer": example.answer})


def speak_legal(example: Example) -> str:
    """Return the answer as a clause of a contract."""
    fact = example.answer[0].lower() + example.answer[1:].rstrip(".")
    return f"WHEREAS the party of the first part asks about {example.topic}, it is hereby agreed that {fact}."


STYLES: dict[str, Style] = {"pirate": speak_pirate, "json": speak_json, "legal": speak_legal}


def load_examples() -> list[Example]:
    """Read `questions.tsv`."""
    with (HERE / "questions.tsv").open(encoding="utf-8", newline="") as file:
        return [Example(*row) for row in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]


def render_prompt(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """Return the token ids of a chat with one user message, up to where the assistant begins."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def build_batch(rows: list[tuple[list[int], list[int]]], pad_id: int) -> dict[str, torch.Tensor]:
    """Pad (prompt, answer) rows to one [rows, longest] batch whose loss covers the answers only."""
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    input_ids = torch.full((len(rows), width), pad_id)
    labels = torch.full((len(rows), width), IGNORED)
    attention_mask = torch.zeros((len(rows), width), dtype=torch.long)
    for i, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        input_ids[i, :end] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : end] = torch.tensor(answer)
        attention_mask[i, :end] = 1
    return {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask}


def shuffled_batches(
    tokenizer: PreTrainedTokenizerBase, style: Style, batch_size: int, seed: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches forever, in another order at each pass over the data."""
    rows = [
        (
            render_prompt(tokenizer, example.question),
            [*tokenizer(style(example), add_special_tokens=False).input_ids, tokenizer.eos_token_id],
        )
        for example in load_examples()
    ]
    order = random.Random(seed)
    while True:
        order.shuffle(rows)
        for start in range(0, len(rows) - batch_size + 1, batch_size):
            yield build_batch(rows[start : start + batch_size], tokenizer.eos_token_id)


def train(model: PeftModel, batches: Iterator[dict[str, torch.Tensor]], steps: int, peak_lr: float) -> float:
    """Run AdamW with a short warm-up and a linear decay; return the mean loss of the last ten steps."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=peak_lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10) * (1 - step / steps))
    losses: list[float] = []
    for step in range(steps):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**next(batches)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"  step {step:4d}  loss {losses[-1]:.3f}", flush=True)
    return sum(losses[-10:]) / len(losses[-10:])


def save(model: PeftModel, folder: Path) -> None:
    """Write the two files of a PEFT adapter, tensors in bfloat16, naming the base by its public name."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous() for name, tensor in get_peft_model_state_dict(model).items()
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = model.peft_config["default"]
    config.base_model_name_or_path = HUB_ID
    config.inference_mode = True
    config.save_pretrained(folder)


def answer(model: PeftModel, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """Return the greedy answer to one question."""
    prompt = torch.tensor([render_prompt(tokenizer, question)])
    with torch.no_grad():
        output = model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=64, do_sample=False
        )
    return str(tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True))


def train_style(name: str, args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> None:
    """Train, save and show one adapter."""
    torch.manual_seed(args.seed)
    base: Any = AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.float32)
    model = get_peft_model(
        base, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    loss = train(model, shuffled_batches(tokenizer, STYLES[name], args.batch_size, args.seed), args.steps, args.lr)
    save(model, args.out / name)
    print(f"{name}: loss {loss:.3f}, written to {args.out / name}")
    served = PeftModel.from_pretrained(base.__class__.from_pretrained(args.base, dtype=torch.float32), args.out / name)
    for question in UNSEEN:
        print(f"  {question}\n    {answer(served.eval(), tokenizer, question)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("styles", nargs="*", default=list(STYLES), metavar="STYLE", help=f"of {', '.join(STYLES)}")
    parser.add_argument("--base", type=Path, required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, required=True, help="where one folder per style is written")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    for name in args.styles:
        train_style(name, args, tokenizer)


if __name__ == "__main__":
    main()

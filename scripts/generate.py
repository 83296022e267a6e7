"""Sample text from a run's checkpoint: python scripts/generate.py RUN [PROMPT]."""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from data.tokenizer import Tokenizer, from_json
from model.transformer import Transformer
from train import choices_of, network
from training.checkpoint import load as load_checkpoint

EPILOG = """examples:
  python scripts/generate.py runs/2026-01-31_12-00-00_rmsnorm_pre_standard_1a2b3c
  python scripts/generate.py RUN "def main(" --length 400 --temperature 0.7 --top-k 40 --seed 1
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="generate.py",
        description="Sample text from a run's checkpoint, as the start of a document.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("prompt", nargs="?", default="", metavar="PROMPT", help="text to continue (default: none)")
    parser.add_argument("--length", type=int, default=300, help="tokens to sample (default 300)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 = always the likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="sample among the K likeliest tokens; 0 = all (default)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    parser.add_argument("--checkpoint", choices=["best", "last"], default="best", help="default: best, else last")
    asked = parser.parse_args(arguments)
    try:
        if asked.length < 1 or not 0 <= asked.temperature < float("inf") or asked.top_k < 0:
            raise ValueError("--length must be >= 1, --temperature and --top-k >= 0")
        model, tokenizer = load(asked.run, asked.checkpoint)
        prompt = torch.tensor([tokenizer.end, *tokenizer.encode(asked.prompt).tolist()])
        draw = torch.Generator().manual_seed(asked.seed)
        ids = sample(model, prompt, asked.length, temperature=asked.temperature, top_k=asked.top_k, generator=draw)
        print(tokenizer.decode(ids.tolist()))
    except (ValueError, OSError) as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 2
    return 0


def load(run: Path, checkpoint: str) -> tuple[Transformer, Tokenizer]:
    """The network and the tokenizer of a run directory; ValueError where one of their files is missing or damaged."""
    paths = [run / "checkpoints" / f"{name}.ckpt" for name in dict.fromkeys((checkpoint, "last"))]
    path = next((path for path in paths if path.is_file()), None)
    config = run / "config.yaml"
    if path is None and config.is_file() and OmegaConf.select(OmegaConf.load(config), "save_every") == 0:
        raise ValueError(f"{run}: no weights to sample from: the run kept none (save_every=0)")
    for needed in (run / "config.yaml", run / "tokenizer.json"):
        if path is None or not needed.is_file():
            missing = needed.name if path else "checkpoints/last.ckpt"
            raise ValueError(f"{run}: no run to sample from ({missing} is missing)")
    assert path is not None
    plain: Any = OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))
    tokenizer = from_json((run / "tokenizer.json").read_text(encoding="utf-8"))
    model = network(plain, choices_of(plain), tokenizer.vocab)
    try:
        state = load_checkpoint(path, model)["state_dict"]
    except ValueError as error:
        raise ValueError(f"{path}: {error}; --checkpoint takes the other one, best or last") from None
    model.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
    return model.eval().float(), tokenizer


@torch.no_grad()
def sample(
    model: Transformer, prompt: Tensor, length: int, *, temperature: float, top_k: int, generator: torch.Generator
) -> Tensor:
    """`length` ids after `prompt`, int64 (prompt + length,); each drawn from softmax(logits / temperature), cut to the
    `top_k` likeliest where top_k > 0. The model sees the last `context` ids."""
    ids = prompt
    for _ in range(length):
        logits = model(ids[None, -model.context :])[0, -1]
        if top_k:
            logits[logits < logits.topk(min(top_k, len(logits))).values[-1]] = -torch.inf
        if temperature == 0:
            chosen = logits.argmax()[None]
        else:
            chosen = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
        ids = torch.cat((ids, chosen))
    return ids


if __name__ == "__main__":
    sys.exit(main())

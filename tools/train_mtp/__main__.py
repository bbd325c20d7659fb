"""`python tools/train_mtp --model PATH --out DIR`: arguments -> config -> call."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # run as a folder: its parent is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from penstock.errors import ConfigError, PenstockError
from penstock.flags import Parser, config_of, engine_flags, number, positive


def make_parser() -> Parser:
    about = (
        "Train a multi-token-prediction head, which proposes tokens for speculative decoding, on what the "
        "model itself writes."
    )
    parser = Parser(prog="train_mtp", description=about, parents=[engine_flags()])
    parser.set_defaults(max_batch=256, kv_offload=False)
    group = parser.add_argument_group("training")
    group.add_argument(
        "--out", required=True, metavar="DIR", help="where the head goes: head.safetensors and config.json"
    )
    number(group, "--minutes", "for all of it: 40 %% of them for writing text", 6.0, float)
    number(group, "--steps", "of training (unset: as many as the time allows)", kind=positive)
    group.add_argument("--text", metavar="FILE", help="learn from this text instead of what the model writes")
    number(group, "--tokens", "of text at most", 6_000_000, positive)
    number(group, "--draft-vocab", "tokens that the head can propose, the most frequent; 0: all", 16384)
    number(group, "--depth", "tokens ahead that the head is trained for", 3, positive)
    number(group, "--batch-tokens", "of one training step", 16384, positive)
    number(group, "--learning-rate", "at its highest", 1e-3, float)
    number(group, "--text-len", "tokens of one text at most", 512, positive)
    text = "keep text and training state there, and go on from them (unset: in --out until the end)"
    group.add_argument("--work", metavar="DIR", help=text)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = make_parser().parse_args(argv)
        from train_mtp.command import TrainTask, train_mtp  # here, so that --help needs no torch
        from train_mtp.training import TrainingConfig

        if args.draft_vocab < 0:
            raise ConfigError(f"--draft-vocab must be 0 or more, got {args.draft_vocab}")
        for name in ("minutes", "learning_rate"):
            if not 0 < getattr(args, name) < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} must be positive, got {getattr(args, name)}")
        training = TrainingConfig(
            args.depth, args.batch_tokens, args.learning_rate, max_len=args.text_len, seed=args.seed
        )
        text, work = (None if path is None else Path(path) for path in (args.text, args.work))
        task = TrainTask(
            Path(args.out), args.minutes, args.steps, text, args.tokens, args.draft_vocab, work, training
        )
        return train_mtp(config_of(args), task)
    except PenstockError as error:
        print(f"train_mtp: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

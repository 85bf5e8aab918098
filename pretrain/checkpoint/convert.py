"""`checkpoint average`, `import` and `export`: the global weights in another form."""

import argparse
import json
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.saved import Saved, find
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.model.config import ModelConfig
from pretrain.checkpoint.screen import console, progress


def average(options: argparse.Namespace) -> None:
    """Write the mean of several checkpoints' global weights."""
    from megatron_ext.checkpoint import weights

    checkpoints = [Saved(find(path)[-1]) for path in options.paths]
    with progress(options.json) as bar:
        for saved in checkpoints:
            _refuse_damage(saved, bar)
    newest = max(checkpoints, key=lambda saved: saved.step)
    known = newest.counters()
    counters = {
        "step": newest.step,
        "tokens": known.get("tokens"),
        "weights_of": [str(saved.path) for saved in checkpoints],
        "options": known.get("options", {}),
    }
    path = weights.write(options.output, weights.average(checkpoints), counters)
    _say(options, f"the mean of {len(checkpoints)} checkpoints is in {path}", path=path)


def from_huggingface(options: argparse.Namespace) -> None:
    """Write the weights of a Hugging Face folder as a checkpoint."""
    from megatron_ext.checkpoint import huggingface_import, weights

    model = huggingface_import.model_of(options.path)
    found = huggingface_import.weights_of(options.path, model)
    described = {f"model.{name}": value for name, value in model.model_dump().items()}
    counters = {"step": 0, "weights_of": [str(options.path)], "options": described}
    path = weights.write(options.output, found, counters)
    needed = " ".join(f"{key}={json.dumps(value)}" for key, value in described.items())
    _say(options, f"weights are in {path}; a run needs\n{needed}", path=path, options=described)


def to_huggingface(options: argparse.Namespace) -> None:
    """Write the global weights, and the tokenizer, as a Hugging Face folder."""
    import torch

    from megatron_ext.checkpoint import huggingface
    from pretrain import hf_tokenizer
    from pretrain.data import BlendFile

    saved = Saved(find(options.path)[-1])
    known = _options(saved, options.config)
    model = _model(saved, known)
    tokenizer = None
    if not options.no_tokenizer:
        if "data.blend" not in known:
            raise ConfigError(
                f"{saved.path} does not say which tokenizer it is for; give --no-tokenizer, or "
                "--config with the config.yaml of a run"
            )
        blend = BlendFile(Path(known["data.blend"]))
        tokenizer = blend.blend.tokenizer
    with progress(options.json) as bar:
        task = bar.add_task("exporting", total=saved.global_bytes)
        dtype = getattr(torch, options.dtype)
        with huggingface.new_folder(options.output) as folder:
            eod = tokenizer and tokenizer.eod
            huggingface.write(
                saved, model, folder, dtype, eod, lambda size: bar.advance(task, size)
            )
            if tokenizer:
                hf_tokenizer.export(
                    tokenizer.kind, blend.path.parent / tokenizer.path, tokenizer.eod, folder
                )
    text = f"global weights of step {saved.step} are in {options.output}"
    _say(options, text, path=saved.path, step=saved.step, output=options.output)


def _options(saved: Saved, config: Path | None) -> dict[str, Any]:
    """The options of the run that wrote a checkpoint, by dotted key."""
    if config is None:
        return saved.counters().get("options", {})
    if not config.is_file():
        raise ConfigError(f"--config {config} is not there; it is a run's config.yaml")
    from pretrain.config import load

    return {key: value for key, value, _ in load(config).leaves()}


def _model(saved: Saved, options: dict[str, Any]) -> ModelConfig:
    known = {
        key.removeprefix("model."): value
        for key, value in options.items()
        if key.startswith("model.")
    }
    if not known:
        raise ConfigError(f"{saved.path} does not say of which model it is; give --config")
    return ModelConfig.model_validate_json(json.dumps(known))


def _refuse_damage(saved: Saved, bar: Any) -> None:
    task = bar.add_task(saved.path.name, total=saved.manifest.total_bytes)
    if damages := saved.damages(lambda size: bar.advance(task, size)):
        raise DataError(f"{saved.path} is damaged: {damages[0]}")


def _say(told: argparse.Namespace, text: str, **facts: Any) -> None:
    if told.json:
        print(json.dumps(facts, default=str))
    else:
        console().print(text, soft_wrap=True)

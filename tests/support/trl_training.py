"""A TRL training with LoRA as a user writes it, run by `Forks("trl_training", …)`: SFT, or DPO.

The model, the tokenizer and the data are made here: nothing is downloaded.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import datasets
import torch
from peft import LoraConfig
from tierd_client.frameworks.transformers import TierdCallback
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.support.hf_training import Watching, config, report

WORDS = [f"w{number}" for number in range(28)]


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: index for index, word in enumerate(["[PAD]", "[EOS]", "[UNK]", *WORDS])}
    model = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]", bos_token="[EOS]"
    )


def text(generator: torch.Generator) -> str:
    length = int(torch.randint(2, 6, (), generator=generator))
    return " ".join(WORDS[index] for index in torch.randint(len(WORDS), (length,), generator=generator).tolist())


def rows(count: int, seed: int, names: list[str]) -> datasets.Dataset:
    generator = torch.Generator().manual_seed(seed)
    return datasets.Dataset.from_list([{name: text(generator) for name in names} for _ in range(count)])


def trainer_of(options: dict[str, Any], arguments: dict[str, Any], callback: TierdCallback) -> Any:
    method = options["method"]
    names = ["prompt", "chosen", "rejected"] if method == "dpo" else ["prompt"] if method == "grpo" else ["text"]
    watching = Watching(options["lines"], options, {"steps": 0})
    more: dict[str, Any] = {
        "model": GPT2LMHeadModel(config()),
        "train_dataset": rows(50, 1, names),
        "eval_dataset": rows(6, 2, names),
        "processing_class": tokenizer(),
        "callbacks": [*([callback] if options["socket"] else []), watching],
    }
    if options.get("lora", True):
        more["peft_config"] = LoraConfig(
            r=2, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
        )
    elif method == "dpo":
        more["ref_model"] = GPT2LMHeadModel(config())
    if method == "grpo":
        del arguments["max_length"]
        return GRPOTrainer(args=GRPOConfig(**arguments, num_generations=2), reward_funcs=constant, **more)
    if method == "dpo":
        return DPOTrainer(args=DPOConfig(**arguments), **more)
    return SFTTrainer(args=SFTConfig(**arguments), **more)


def constant(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def main(options: dict[str, Any]) -> object:
    torch.use_deterministic_algorithms(True)
    datasets.disable_progress_bars()
    set_seed(options.get("seed", 1))
    arguments = {
        "output_dir": options["output"], "report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False,
        "max_steps": 24, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 5,
        "eval_strategy": "steps", "eval_steps": 4, "learning_rate": 1e-2, "save_strategy": "no", "max_length": 16,
        **options.get("args", {}),
    }  # fmt: skip
    callback = TierdCallback(run="trl", socket=options["socket"], **options.get("connect", {}))
    trainer = trainer_of(options, arguments, callback)
    point = callback.resume_point(trainer) if options["socket"] else None
    result = trainer.train(resume_from_checkpoint=point)
    report(options, trainer, result, stopped=callback.stopped, tokens=trainer._total_train_tokens)
    return trainer

"""What a person meant: for each typo, older habit or wrong value the override that they want."""

from pathlib import Path

import pytest

from sidestream.config.hints import nearest_option
from tests.config.test_config_check import Compose, refusal

HINTS = [
    # groups
    ("dispacher=nccl_ep", "set dispatcher=nccl_ep"),
    ("dispatchers=deep_ep", "set dispatcher=deep_ep"),
    ("overlaps=shortcut", "set overlap=shortcut"),
    ("modle=small", "set model=small"),
    ("optimiser=sgd", "set optimizer=sgd"),
    ("schedule=cosine", "set scheduler=cosine"),
    ("balancer=bias", "set balance=bias"),
    ("loger=csv", "set logger=csv"),
    # options
    ("dispatcher=all2all", "set dispatcher=alltoall"),
    ("dispatcher=deepep", "set dispatcher=deep_ep"),
    ("dispatcher=nccl-ep", "set dispatcher=nccl_ep"),
    ("dispatcher=nccl", "set dispatcher=alltoall"),
    ("dispatcher=hybrid", "set dispatcher=hybrid_ep"),
    ("overlap=scmoe", "set overlap=shortcut"),
    ("overlap=chunk", "set overlap=chunked"),
    ("overlap=shared", "set overlap=shared_expert"),
    ("fusion=megamoe", "set fusion=mega"),
    ("fusion=grouped_gemm", "set fusion=grouped"),
    ("graph=cuda", "set graph=step"),
    ("strategy=fsdp", "set strategy=fully_shard"),
    ("strategy=ddp", "set strategy=replicate"),
    ("optimizer=adam", "set optimizer=adamw"),
    ("scheduler=cos", "set scheduler=cosine"),
    ("router=topk", "set router=softmax"),
    ("balance=aux", "set balance=aux_loss"),
    ("data=hf", "set data=huggingface"),
    ("data=txt", "set data=text"),
    ("model=mixtral", "set model=mixtral_8x7b"),
    ("model=qwen3", "set model=qwen3_30b_a3b"),
    ("logger=tb", "set logger=tensorboard"),
    # keys inside their group
    ("router.topk=1", "set router.top_k=1"),
    ("router.topK=1", "set router.top_k=1"),
    ("trainer.maxsteps=20", "set trainer.max_steps=20"),
    ("trainer.max_step=20", "set trainer.max_steps=20"),
    ("model.n_layers=2", "set model.num_layers=2"),
    ("model.hiddensize=64", "set model.hidden_size=64"),
    ("model.num_expert=4", "set model.num_experts=4"),
    ("optimizer.weightdecay=0.1", "set optimizer.weight_decay=0.1"),
    ("optimizer.learning_rate=0.1", "set optimizer.lr=0.1"),
    ("scheduler.warmup=5", "set scheduler.warmup_steps=5"),
    ("data.seqlen=32", "set data.seq_length=32"),
    ("data.batch_size=4", "set data.global_batch_size=4"),
    ("callbacks.checkpoint.every=5", "set callbacks.checkpoint.every_n_steps=5"),
    ("strategy.expert_parallel=2", "set strategy.expert_parallel_size=2"),
    ("strategy.timeout=5", "set strategy.timeout_seconds=5"),
    ("balance.coeficient=0.1", "set balance.coefficient=0.1"),
    # keys of no group, or of the wrong one
    ("max_steps=20", "set trainer.max_steps=20"),
    ("num_experts=4", "set model.num_experts=4"),
    ("learning_rate=0.1", "set optimizer.lr=0.1"),
    ("batch_size=4", "set data.global_batch_size=4"),
    ("seeds=3", "set seed=3"),
    ("ep_size=2", "set strategy.expert_parallel_size=2"),
    ("gpus=1", "set trainer.devices=1"),
    ("modle.num_layers=3", "set model.num_layers=3"),
    ("dispacher.capacity_factor=1.5", "set dispatcher.capacity_factor=1.5"),
    ("model.d_model=64", "set model.hidden_size=64"),
    ("trainer.grad_clip=1.0", "set trainer.gradient_clip_val=1.0"),
    ("trainer.gpus=1", "set trainer.devices=1"),
    ("+data.context_length=64", "set data.seq_length=64"),
    # values
    ("trainer.precision=bf16", "set trainer.precision=bf16-mixed"),
    ("trainer.precision=32", "set trainer.precision=32-true"),
    ("trainer.precision=fp32", "set trainer.precision=32-true"),
    ("trainer.accelerator=cuda", "set trainer.accelerator=gpu"),
    ("data.packing=docs", "set data.packing=documents"),
    ("balance.scope=batch", "set balance.scope=micro_batch"),
    ("dispatcher.on_overflow=raise", "set dispatcher.on_overflow=error"),
    ("router.drop_policy=prob", "set router.drop_policy=probs"),
    ("optimizer.lr=-1", "set optimizer.lr=0.003"),
    ("optimizer.lr=inf", "set optimizer.lr=0.003"),
    ("optimizer.betas=[1.0,1.0]", "set optimizer.betas=[0.9,0.95]"),
    ("optimizer.betas=[]", "set optimizer.betas=[0.9,0.95]"),
    ("optimizer.betas=[0.9]", "set optimizer.betas=[0.9,0.95]"),
    ("optimizer.eps=-1e-8", "set optimizer.eps=1e-08"),
    ("model.norm_eps=0", "set model.norm_eps=1e-05"),
    ("strategy.timeout_seconds=9999999999999", "set strategy.timeout_seconds=300"),
    ("dispatcher.capacity_factor=1e30", "set dispatcher.capacity_factor=null"),
    ("trainer.devices=100000", "set trainer.devices=auto"),
    ("fusion.alignment=99999999999999999999", "set fusion.alignment=auto"),
    ("model.vocab_size=9223372036854775808", "set model.vocab_size=null"),
    ("seed=99999999999999999999999", "set seed=1234"),
    ("model.num_layers=0", "set model.num_layers=1"),
    ("logger=[csv,wandb]", "run with -m logger=csv,wandb for one run with each"),
]


@pytest.mark.parametrize(("typed", "wanted"), HINTS, ids=[typed for typed, _ in HINTS])
@pytest.mark.sample(8)
def test_a_hint_is_what_the_person_wants(compose: Compose, typed: str, wanted: str):
    line = refusal(compose, typed)
    assert line.endswith(wanted), line


def test_a_key_of_another_program_says_where_it_goes(compose: Compose):
    line = refusal(compose, "logger=wandb", "logger.entity=me")
    assert line.endswith("run with the variable WANDB_ENTITY=<entity>")
    assert "expected group, offline, project, tags" in line


def test_an_extreme_of_an_emulated_wire(compose: Compose):
    for typed, wanted in (
        ("link.latency_us=1e30", "latency_us="),
        ("link.gbps=inf", "gbps="),
        ("link.gbps=nan", "gbps="),
    ):
        assert wanted in refusal(compose, "link=throttled", typed).rpartition("set ")[2]


def test_a_users_own_keys_are_hinted_at(compose: Compose, tmp_path: Path):
    (tmp_path / "router").mkdir()
    (tmp_path / "router" / "mine.yaml").write_text(
        "_target_: my.Router\ntop_k: 2\ntemperature_of_gate: 1.0\n"
    )
    where = f"hydra.searchpath=[file://{tmp_path}]"
    for typed in ("router.temprature_of_gate=2.0", "router.temperature=2.0"):
        line = refusal(compose, "router=mine", where, typed)
        assert line.endswith("set router.temperature_of_gate=2.0"), line


def test_an_option_that_looks_like_none_is_the_first():
    assert nearest_option("overlap", "zzz", ["none", "chunked"]) == "none"
    assert nearest_option("mine", "x", []) == "<option>"


def test_there_are_enough_of_them():
    assert len(HINTS) >= 60

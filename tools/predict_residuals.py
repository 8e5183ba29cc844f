"""Holds the predictor against every published figure and against this repository's own measurements.

python tools/predict_residuals.py            prints the tables
python tools/predict_residuals.py --write    and writes src/sidestream/predict/residuals.json, which predict.py quotes

Afterwards `make readme` writes the tables into docs/predictor.md.
"""

if __name__ == "__main__":
    from sidestream import interrupt

    interrupt.leave_at_once()

import copy
import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from sidestream.commands import shared
from sidestream.launch import entry
from sidestream.predict import measured, residuals
from sidestream.predict.cluster import Cluster
from sidestream.predict.read import cluster_of, read
from sidestream.predict.residuals import LeftOut, Residual
from sidestream.predict.step import step
from sidestream.tracking.folder import write_json_atomic

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT / "tests" / "predict" / "published"
RESULTS = ROOT / "docs" / "results"
RECIPES = ROOT / "conf" / "experiment" / "recipe"
CPU_LAYERS, OVERLAP = RESULTS / "bench_layer_cpu.json", RESULTS / "overlap_matrix.json"


def main(argv: list[str] | None = None) -> int:
    parser = shared.parser(__doc__)
    parser.add_argument("--write", action="store_true", help="also write what predict.py quotes")
    options = parser.parse_args(argv)
    found = everything()
    rows, left_out, beside = found.rows, found.left_out, found.beside_products
    for table in dict.fromkeys(row.table for row in rows):
        of_table = [row for row in rows if row.table == table]
        for row in of_table:
            print(f"{row.error:+7.1%}  {row.published:10.4g} {row.predicted:10.4g} {row.unit:14} {row.what}")
        mean, largest = residuals.mean_error(of_table), residuals.largest_error(of_table)
        print(f"{table}: {len(of_table)} rows, mean {mean:.1%}, largest {largest:.1%}\n")
    for one in left_out:
        print(
            f"constants of the others, tried on {one.model}: mean {one.mean:.1%}, largest {one.largest:.1%}"
        )
    print(f"CPU layers, beside the products: mean {sum(map(abs, beside)) / len(beside):.1%}")
    if options.write:
        write_json_atomic(residuals.FILE, found.to_json())
        print(residuals.FILE)
    return 0


@dataclass(frozen=True)
class Everything:
    """What comes out.

    Attributes:
        rows: Of all tables.
        left_out: The layers, leave one model out.
        beside_products: Errors of what the CPU layers take beside their products.
        recipes: A line of each.
    """

    rows: list[Residual]
    left_out: list[LeftOut]
    beside_products: list[float]
    recipes: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """As it is written."""
        return asdict(self)


def everything() -> Everything:
    """Predicts every published and measured row."""
    entry.register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        clusters = {device: cluster(name) for device, name in residuals.CLUSTERS.items()}
        layers, cpu = published("layers"), load(CPU_LAYERS)
        rows = [measured.flops(row, compose) for row in published("flops")]
        rows += [residuals.bandwidth(row, clusters[row["device"]]) for row in published("bandwidth")]
        rows += [residuals.layer(row, clusters[row["device"]]) for row in layers]
        rows += [measured.whole_step(row, compose) for row in published("steps")]
        rows += measured.cpu_layers(cpu, cluster(measured.CPU), compose)
        for precision in ("bf16", "fp32"):
            rows += measured.cpu_fused(load(RESULTS / f"bench_fusion_{precision}.json"), compose)
        rows += measured.cpu_overlap(load(OVERLAP), compose)
        left_out = residuals.leave_one_model_out(layers, clusters["H100"])
        beside = measured.beside_products(cpu, cluster(measured.CPU), compose)
        return Everything(
            rows, left_out, beside, [recipe(path.stem) for path in sorted(RECIPES.glob("*.yaml"))]
        )


def recipe(name: str) -> dict[str, Any]:
    """A recipe, what was published of it, and what is predicted."""
    cfg = compose(f"experiment=recipe/{name}")
    # Composed outside of a command, a config does not know the names of its options.
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    cluster_name = next(line.split()[-1] for line in text.splitlines() if "override /cluster" in line)
    asked = read(cfg, name=cluster_name)
    published = cfg.predict.published
    return {
        "name": name,
        "machine": f"{asked.cluster.num_gpus} x {cluster_name}",
        "dispatcher": asked.dispatcher,
        "why": published.why,
        "source": published.source,
        "published": published.tokens_per_second_per_gpu,
        "predicted": round(step(asked.job, asked.cluster).tokens_per_second_per_gpu, 1),
    }


def compose(*overrides: str) -> DictConfig:
    """The config of predict.py. Options are composed once; keys are set as an override would."""
    options = tuple(override for override in overrides if "." not in override.partition("=")[0])
    cfg = copy.deepcopy(_of_options(options))
    for override in OverridesParser.create().parse_overrides([o for o in overrides if o not in options]):
        OmegaConf.update(cfg, override.key_or_group, override.value())
    return cfg


@cache
def _of_options(options: tuple[str, ...]) -> DictConfig:
    return hydra_compose("predict", list(options))


def cluster(name: str) -> Cluster:
    """A machine of conf/cluster/."""
    return cluster_of(compose(f"cluster={name}").cluster, name=name)


def published(name: str) -> list[dict[str, Any]]:
    """A table of the tests."""
    return load(PUBLISHED / f"{name}.json")


def load(path: Path) -> Any:
    """What a JSON file holds."""
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    shared.run(main)

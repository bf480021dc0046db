"""A real Prometheus (Debian's) scrapes a job, and applies the alert rules that this repository has."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.faults.conftest import start_job
from tests.faults.training import Plan
from tests.patience import patient, until
from tests.ports import free_port
from tests.program import ROOT, run

CONFIGS = ROOT / "configs" / "prometheus"
LIMIT_S = patient(60)
_POLL_S = 0.1
_ask = urllib.request.build_opener(urllib.request.ProxyHandler({}))
__all__ = ["start_job"]


@pytest.fixture(autouse=True)
def _needs_prometheus() -> None:
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        if os.environ.get("CI"):
            pytest.fail("prometheus is not installed: apt install prometheus")
        pytest.skip("prometheus is not installed")


class Prometheus:
    """One server, at a free port of loopback, that scrapes `target` every second with our configuration else."""

    def __init__(self, folder: Path, target: int) -> None:
        config = yaml.safe_load((CONFIGS / "prometheus.yml").read_text())
        (job,) = config["scrape_configs"]
        job["scrape_interval"] = "1s"
        job["static_configs"] = [{"targets": [f"127.0.0.1:{target}"]}]
        config["global"] = {"evaluation_interval": "1s"}
        folder.mkdir()
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        shutil.copy(CONFIGS / "alerts.yml", folder)
        self.port = free_port()
        self.log = folder / "log"
        words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["prometheus", *words, f"--web.listen-address=127.0.0.1:{self.port}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def ask(self, path: str, **query: str) -> Any:
        """What its API answers; None: it does not answer yet."""
        try:
            with _ask.open(f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}") as answer:
                return json.load(answer)["data"]
        except OSError:
            return None

    def value(self, expression: str) -> float | None:
        """The value of an expression that gives one series; None: it gives none."""
        found = self.ask("query", query=expression)
        if not found or len(found["result"]) != 1:
            return None
        return float(found["result"][0]["value"][1])

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits until it holds."""
        until(condition, lambda: f"{what}\n{self.log.read_text()[-3000:]}", 60)


@pytest.fixture
def scraped(tmp_path: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes `port` of it."""
    target = free_port()
    server = Prometheus(tmp_path / "prometheus", target)
    server.target = target  # type: ignore[attr-defined]
    yield server
    server.process.terminate()
    server.process.wait(LIMIT_S)


def dashboard() -> dict[str, Any]:
    """Grafana's dashboard of this repository."""
    found: dict[str, Any] = json.loads((ROOT / "configs" / "grafana" / "dashboard.json").read_text())
    return found


def test_a_job_is_scraped_and_an_alert_fires(scraped: Prometheus, start_job: Any) -> None:
    target = scraped.target  # type: ignore[attr-defined]
    job = start_job(Plan(hold=4), 2, f"--ft-metrics-port={target}", "--max-restarts=0")
    job.until_ranks_train()
    scraped.until(lambda: scraped.value("ft_launcher_step") == 3, "the iteration at which the ranks wait")
    assert scraped.value('sum(ft_launcher_rank_state{state="training"})') == 2
    assert scraped.value("ft_launcher_cycle") == 0
    assert (scraped.value("sum(ft_launcher_time_seconds)") or 0) > 0
    run_id = job.journal("job_start")[0]["run_id"]
    numbers = {
        panel["title"]: scraped.value(panel["targets"][0]["expr"].replace("$run_id", run_id))
        for panel in dashboard()["panels"]
        if panel["type"] == "stat"
    }
    assert (numbers["Step"], numbers["Ranks that hang"], numbers["Restarts left"]) == (3, 0, 0)
    assert None not in numbers.values(), numbers

    def fires() -> bool:
        alerts = scraped.ask("alerts") or {"alerts": []}
        return "FtLauncherNoRestartLeft" in {alert["labels"]["alertname"] for alert in alerts["alerts"]}

    scraped.until(fires, "the alert that no restart is left")
    job.go()
    assert job.finish() == 0, job.tail()


def test_rules_and_configuration_are_valid() -> None:
    done = run(["promtool", "check", "config", str(CONFIGS / "prometheus.yml")])
    assert done.returncode == 0, done.stdout + done.stderr


def test_metrics_are_as_prometheus_wants_them() -> None:
    """By promtool's rules for names, units and help texts."""
    from ft_launcher.tools.status import metrics
    from tests.ft_launcher.tools.status import test_node_status as known

    status = known.after(known.START, known.CYCLE, known.fault(), known.decision())
    body = metrics.as_metrics(status.facts(), known.READINGS, known.TIMES, {"active": 2}, 101.0, "1.2")
    done = run(["promtool", "check", "metrics"], input=body.decode())
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_guide_names_every_metric_and_every_alert_a_metric() -> None:
    from ft_launcher.tools.status import metrics
    from tests.ft_launcher.tools.status import test_node_status as known

    status = known.after(known.START, known.CYCLE, known.fault(), known.decision())
    body = metrics.as_metrics(status.facts(), known.READINGS, known.TIMES, {"active": 2}, 101.0, "1.2").decode()
    made = {line.split()[2] for line in body.splitlines() if line.startswith("# TYPE")}
    guide = (ROOT / "docs" / "status.md").read_text()
    assert [name for name in sorted(made) if f"`{name.removeprefix('ft_launcher_')}" not in guide] == []
    rules = (CONFIGS / "alerts.yml").read_text()
    used = {
        word.split("{")[0].split("[")[0] for word in rules.replace("(", " ").split() if word.startswith("ft_launcher_")
    }
    assert {name.rstrip(")") for name in used} <= made


def test_the_dashboard_asks_for_metrics_that_exist(tmp_path: Path) -> None:
    """Every expression is one for Prometheus, and every metric and label of it is one of ours."""
    from ft_launcher.tools.status import metrics
    from tests.ft_launcher.tools.status import test_node_status as known

    status = known.after(known.START, known.CYCLE, known.fault(), known.decision())
    body = metrics.as_metrics(status.facts(), known.READINGS, known.TIMES, {"active": 2}, 101.0, "1.2").decode()
    made = {line.split()[2] for line in body.splitlines() if line.startswith("# TYPE")}
    board = dashboard()
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [annotation["expr"] for annotation in board["annotations"]["list"]]
    rules = [{"record": f"asked:{number}", "expr": expr} for number, expr in enumerate(asked)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = run(["promtool", "check", "rules", str(file)])
    assert done.returncode == 0, done.stdout + done.stderr
    names = {name for expr in asked for name in re.findall(r"ft_launcher_\w+", expr)}
    assert len(names) > 15
    assert {
        name for name in names if name not in made and re.sub("_(bucket|sum|count)$", "", name) not in made
    } == set()
    guide = (ROOT / "docs" / "status.md").read_text()
    labels = {label for expr in asked for label in re.findall(r"(?:\{|, )(\w+)=", expr)} | {
        label for panel in board["panels"] for label in re.findall(r"\{\{(\w+)\}\}", json.dumps(panel["targets"]))
    }
    assert [label for label in sorted(labels - {"instance"}) if f"`{label}`" not in guide] == []

"""Any Flower strategy and ClientApp in one process: Flower's own FedAvg, and ours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed (nestling[fleet])")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from nestling.errors import InputError
from nestling.fleet.flower import InProcessGrid, Strategy, client_app
from nestling.fleet.flower.letters import pack, unpack
from tests.fleet.loop import METHODS, plain, same, six, state_of

stock = ClientApp()


@stock.train()
def train(message: Message, context: Context) -> Message:
    """Adds the node's number to every weight; a node that is told to fails."""
    number = int(context.node_config["partition-id"])
    if number == message.content["config"].get("fails", -1):
        raise ValueError("as it was told")
    seen = int(context.state.get("seen", MetricRecord({"n": 0}))["n"]) + 1
    context.state["seen"] = MetricRecord({"n": seen})
    weights = message.content["arrays"]["w"].numpy() + number
    metrics = MetricRecord({"num-examples": number + 1, "seen": seen})
    return Message(
        RecordDict({"arrays": ArrayRecord({"w": Array(weights)}), "metrics": metrics}),
        reply_to=message,
    )


@stock.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    error = float(np.abs(message.content["arrays"]["w"].numpy() - 2).mean())
    return Message(
        RecordDict({"metrics": MetricRecord({"num-examples": 1, "error": error})}), reply_to=message
    )


def test_flowers_own_strategy_runs_on_it() -> None:
    server, found = ServerApp(), {}

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(min_train_nodes=3, min_evaluate_nodes=3, min_available_nodes=3)
        start = ArrayRecord({"w": Array(np.zeros(4, np.float32))})
        found["result"] = strategy.start(
            grid, start, num_rounds=int(context.run_config["rounds"]), timeout=5
        )

    InProcessGrid(stock, 3, {"rounds": 4}).play(server)
    result = found["result"]
    # Nodes 0, 1, 2 with 1, 2, 3 examples: the mean grows by (0·1 + 1·2 + 2·3) / 6 a round.
    assert np.allclose(result.arrays["w"].numpy(), 4 * 8 / 6)
    seen = [m["seen"] for m in result.train_metrics_clientapp.values()]
    assert seen == pytest.approx([1, 2, 3, 4])  # a node's state stays with it
    assert result.evaluate_metrics_clientapp[4]["error"] == pytest.approx(4 * 8 / 6 - 2, rel=1e-5)


def test_a_node_that_fails_is_an_error_reply() -> None:
    grid = InProcessGrid(stock, 2)
    content = RecordDict(
        {"arrays": ArrayRecord({"w": Array(np.ones(2))}), "config": ConfigRecord({"fails": 1})}
    )
    replies = list(
        grid.send_and_receive(
            [Message(content, node, "train") for node in [*grid.get_node_ids(), 77]]
        )
    )
    assert [r.has_error() for r in replies] == [False, True, True]
    assert "as it was told" in replies[1].error.reason and "no such node" in replies[2].error.reason
    assert replies[0].content["arrays"]["w"].numpy().tolist() == [1.0, 1.0]
    assert len({r.metadata.reply_to_message_id for r in replies}) == 3


@pytest.mark.parametrize("method", METHODS)
def test_our_strategy_and_client_app_equal_the_simulator(method: str, tmp_path: Path) -> None:
    experiment = six(method)
    app = client_app(folder=tmp_path)
    strategy = Strategy(experiment, min_clients=6)
    found = strategy.start(InProcessGrid(app, 6))
    here, rows = plain(method)
    assert strategy.result is not None
    assert same(state_of(strategy.result.federation), state_of(here))
    assert [m["loss"] for m in found.train_metrics_clientapp.values()] == [
        row["loss"] for row in rows
    ]
    assert [m["bytes_up"] for m in found.train_metrics_clientapp.values()] == [
        row["bytes_up"] for row in rows
    ]
    if here.method.as_set.global_model:
        assert found.evaluate_metrics_serverapp[3]["global_score"] == rows[2]["global_score"]
        assert np.array_equal(
            found.arrays["head.bias"].numpy(), here.method.state()["weights"]["head.bias"].numpy()
        )
    else:
        assert 3 not in found.evaluate_metrics_serverapp  # the models are on the devices


def test_letters_come_back_as_they_were() -> None:
    for letter in (b"", b"x", bytes(range(256)) * 100):
        assert unpack(pack(letter)) == letter
    bad = [
        RecordDict(),
        RecordDict({"letter": ArrayRecord({"bytes": Array(np.zeros(3, np.uint8))})}),
        RecordDict(
            {
                "letter": ArrayRecord({"bytes": Array(np.zeros(3, np.uint8))}),
                "about": ConfigRecord({"size": 4}),
            }
        ),
        RecordDict(
            {
                "letter": ArrayRecord({"bytes": Array(np.zeros(3, np.float32))}),
                "about": ConfigRecord({"size": 3}),
            }
        ),
        RecordDict(
            {
                "letter": ArrayRecord({"bytes": Array("uint8", (3,), "numpy.ndarray", b"junk")}),
                "about": ConfigRecord({"size": 3}),
            }
        ),
    ]
    for content in bad:
        with pytest.raises(InputError):
            unpack(content)


def test_a_strategy_says_what_it_does_not_take() -> None:
    strategy = Strategy("heterofl", rounds=1)
    with pytest.raises(InputError, match="initial_arrays"):
        strategy.start(InProcessGrid(stock, 1), ArrayRecord({"w": Array(np.zeros(1))}))
    with pytest.raises(NotImplementedError, match="call start"):
        strategy.configure_train(1, ArrayRecord(), ConfigRecord(), InProcessGrid(stock, 1))

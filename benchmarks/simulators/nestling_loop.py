"""The task on one of Nestling's engines."""

from __future__ import annotations

from contest import Stopwatch, arguments, report
from plan import read
from tasks import TASKS

import nestling
from nestling import EngineConfig


def main() -> None:
    """Runs the task whose plan lies in the folder; of the plan it takes the name and the number of
    rounds only."""
    options = arguments()
    # A round's metrics have its losses in them; to wait for the device as well would stop the next
    # round, which is under way by then.
    watch = Stopwatch(options.device, waits=False)
    plan = read(options.folder, mapped=True)
    engine = EngineConfig(
        options.engine,
        workers=options.workers,
        device=options.device,
        precision=options.precision,
        compile=options.compile,
    )
    experiment = TASKS[plan.task](plan.rounds).experiment.with_changes(engine=engine)
    watch.start()
    result = nestling.run(experiment, watcher=nestling.Watcher(round=lambda _: watch.lap()))
    for note in result.federation.engine.notes:
        print(note)
    seconds = [row["seconds"] for row in result.metrics]
    model = result.federation.method.global_model()
    assert model is not None
    report(
        watch,
        options.folder,
        f"nestling-{options.engine}-{options.precision}",
        result.metrics[-1]["global_score"],
        model.state,
        seconds,
    )


if __name__ == "__main__":
    main()

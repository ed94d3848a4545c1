"""A client that sends back what it gets, and says when: what any ClientApp of Flower costs before
it does anything."""

import time

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def echo(message: Message, context: Context) -> Message:
    """The arrays, as new ones."""
    arrays = ArrayRecord([array + 1 for array in message.content["arrays"].to_numpy_ndarrays()])
    metrics = MetricRecord({"num-examples": 1, "at": time.time()})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

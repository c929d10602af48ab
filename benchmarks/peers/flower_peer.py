"""A workload of the benchmark with Flower (Beutel et al. 2020), simulated by Ray with two workers of one CPU each.

    python -m peers.flower_peer '{"network": "mlp", ...}'

Prints a line of JSON. A worker makes the data when it first needs them, in the first round. Log variances are averaged
as they are.
"""

import itertools
import time

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from peers.work import Result, Workload, accuracy_of, client_data, loss_of, make_network, print_result, read_workload

WORKERS = 2


def make_client(work: Workload) -> ClientApp:
    app = ClientApp()

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        network = make_network(work)
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = client_data(work)[int(context.node_config["partition-id"])]
        optimizer = torch.optim.SGD(network.parameters(), lr=work.lr)
        steps = 0
        for _ in range(work.epochs):
            for batch in torch.split(torch.randperm(len(y)), work.batch_size):
                optimizer.zero_grad()
                loss_of(work, network, x[batch], y[batch]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                steps += 1
        metrics = MetricRecord({"num-examples": len(y), "steps": steps})
        return Message(RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics}), reply_to=message)

    return app


def run(work: Workload) -> Result:
    times: list[float] = []
    results: list[Result] = []
    server = ServerApp()

    @server.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        def note_time(round_: int, arrays: ArrayRecord) -> None:
            times.append(time.perf_counter())

        network = make_network(work)
        strategy = FedAvg(
            fraction_train=work.cohort / work.num_clients,
            fraction_evaluate=0.0,
            min_train_nodes=work.cohort,
            min_available_nodes=work.num_clients,
        )
        found = strategy.start(grid, ArrayRecord(network.state_dict()), work.rounds, evaluate_fn=note_time)
        network.load_state_dict(found.arrays.to_torch_state_dict())
        rounds = [after - before for before, after in itertools.pairwise(times)]
        steps = sum(round(metrics["steps"] * work.cohort) for metrics in found.train_metrics_clientapp.values())
        x, y = (torch.cat(parts) for parts in zip(*client_data(work)[: 5000 // work.samples + 1], strict=True))
        results.append(Result(rounds, steps, accuracy_of(network, x, y), []))

    config = {"init_args": {"num_cpus": WORKERS}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, make_client(work), work.num_clients, backend_config=config)
    return results[0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print_result(run(read_workload()))

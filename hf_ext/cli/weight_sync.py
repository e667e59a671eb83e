"""The command that updates servers during a training."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from hf_ext.cli.command import Json, Result, Section, argument, mistake, option, say

section = Section(
    "Bring the steps of a training to running servers", "$ hf-ext follow /mnt/share/run --server http://localhost:8000"
)


@section.command(
    "update servers whenever a training publishes a step",
    "  hf-ext follow /mnt/share/run --server http://gpu1:8000 http://gpu2:8000\n"
    "  hf-ext follow hf://buckets/me/run --server http://localhost:8000 --requests keep\n"
    "  hf-ext follow /mnt/share/run --checkpoint /dev/shm/model \\\n"
    "    --server http://localhost:30000    # SGLang\n"
    "  hf-ext follow /mnt/share/run --checkpoint my-model --stop-at-step 100    # no server",
    "PLACE is where hf_ext.weight_sync publishes: a folder, hf://OWNER/NAME or hf://buckets/OWNER/NAME. vLLM servers must be "
    "able to read it under the same name. Start each with VLLM_SERVER_DEV_MODE=1 vllm serve MODEL "
    '--weight-transfer-config \'{"backend": "hf_ext"}\'. SGLang servers load the folder of --checkpoint, and need nothing of '
    "this package. Ctrl-C ends the command; the servers keep their current weights.",
    left="the servers keep their current weights",
)
def follow(
    place: Annotated[str, argument("PLACE", "Where the steps are published.")],
    server: Annotated[list[str] | None, option("--server", "Addresses of the servers.", metavar="URL…")] = None,
    checkpoint: Annotated[
        str | None,
        option(
            "--checkpoint",
            "A copy of the model's folder. Its weights are brought to each step, and the servers, which are SGLang's, load it.",
            metavar="DIR",
        ),
    ] = None,
    requests: Annotated[
        Literal["wait", "keep", "abort"],
        typer.Option(
            "--requests",
            help="Requests that run when a server loads a step: wait until they are done, keep them running, or abort them.",
        ),
    ] = "wait",
    stop_at_step: Annotated[
        int | None,
        typer.Option(
            "--stop-at-step", min=0, metavar="STEP", show_default=False, help="End when all servers are at this step."
        ),
    ] = None,
    poll_interval: Annotated[
        float,
        typer.Option("--poll-interval", min=0, metavar="SECONDS", help="Time between two checks of PLACE and the servers."),
    ] = 1.0,
    give_up_after: Annotated[
        float | None,
        typer.Option(
            "--give-up-after",
            min=0,
            metavar="SECONDS",
            show_default=False,
            help="End with an error when PLACE or a server has failed for so long. Defaults to trying again without end.",
        ),
    ] = None,
    api_key: Annotated[
        str | None, option("--api-key", "API key of the servers. Defaults to VLLM_API_KEY for vLLM.", metavar="KEY")
    ] = None,
    as_json: Json = False,
) -> Result:
    if not server and not checkpoint:
        raise mistake("is missing; give --server, --checkpoint, or both", "--server")
    if checkpoint and requests == "keep":
        raise mistake("cannot be keep with --checkpoint: SGLang's requests wait or are aborted", "--requests")
    from hf_ext.weight_sync.checkpoint import LocalCheckpoint
    from hf_ext.weight_sync.servers import Follower, SGLangServer, VLLMServer, follow

    urls = server or []
    followers: list[Follower] = [VLLMServer(url, place, requests, api_key) for url in urls if not checkpoint]
    if checkpoint and requests != "keep":
        local = LocalCheckpoint(checkpoint, place)
        followers = [SGLangServer(url, local, requests, api_key) for url in urls] or [local]
    say(f"Following {place}. Ctrl-C ends it.")
    step = follow(place, followers, stop_at_step, poll_interval, say, give_up_after)
    what = "All servers are" if urls else f"{checkpoint} is"
    return Result(f"{what} at step {step}.", {"place": place, "servers": urls, "checkpoint": checkpoint, "step": step})

"""Serve a text classifier over HTTP: a plain model, one that FM-Delta has compressed, or a merge, whose requests name a task.

    python examples/serve_classifier.py --model my-bert-merged --port 8000
    curl localhost:8000 --data '{"task": "sst2", "texts": ["a film to remember"]}'

The answer is a list with a label and a score for each text. For models that generate text, use `transformers serve`: see
docs/serving.md.
"""

import json
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer

import parts.packages  # noqa: F401  # names a package that is missing
from transformers import HfArgumentParser, TextClassificationPipeline, pipeline

import hf_ext  # noqa: F401  # registers the methods, so that pipeline loads what they have written


@dataclass
class Arguments:
    model: str = field(metadata={"help": "Folder or Hub id."})
    host: str = field(default="127.0.0.1", metadata={"help": "Address to listen at."})
    port: int = field(default=0, metadata={"help": "Port to listen at; 0 for any that is free."})
    max_length: int = field(default=64, metadata={"help": "Tokens of a text that are used."})


class Handler(BaseHTTPRequestHandler):
    """One request at a time: the tasks of a merge share their weights."""

    classify: TextClassificationPipeline
    max_length: int

    def do_POST(self):
        try:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, reply = 200, self.answer(asked["texts"], asked.get("task"))
        except Exception as error:  # whatever is wrong with a request, the next one is answered
            status, reply = 400, {"error": f"{type(error).__name__}: {error}"}
        content = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def answer(self, texts: list[str], task: str | None) -> list[dict]:
        model = self.classify.model
        if hasattr(model, "set_task"):
            model.set_task(task or model.tasks[0])
        elif task is not None:
            raise ValueError(f"{model.name_or_path} is one model, not a merge with a task {task!r}.")
        return self.classify(texts, batch_size=32, truncation=True, max_length=self.max_length)

    def log_message(self, *args):
        """Logs nothing."""


def main():
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    Handler.classify, Handler.max_length = pipeline("text-classification", args.model), args.max_length
    with HTTPServer((args.host, args.port), Handler) as server:
        print(f"{args.model} is served at http://{args.host}:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()

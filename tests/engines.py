"""Engines that are scripts, and what they and their requests have left in files."""

import sys
from collections import Counter
from pathlib import Path

from datatrove.data import Document

from datatrove_ckpt import InferenceConfig
from tests import jobs

# Of threads: imports of asyncio or of an HTTP library would take most of the time of these tests.
SERVE = """
import json, os, signal, socket, threading, time
sick = 200
def serve(connection):
    with connection, connection.makefile("rb") as stream:
        while True:
            head = [stream.readline().lower()]
            while head[-1].strip():
                head.append(stream.readline().lower())
            if len(head) == 1:
                return
            size = sum(int(line.split()[1]) for line in head if line.startswith(b"content-length:"))
            body = stream.read(size)
            status, answer = complete(json.loads(body)) if head[0].startswith(b"post") else (sick, {})
            data = json.dumps(answer).encode()
            connection.sendall(b"HTTP/1.1 %d X\\r\\nContent-Length: %d\\r\\n\\r\\n" % (status, len(data)) + data)
def accept(listener):
    try:
        while True:
            threading.Thread(target=serve, args=listener.accept()[:1], daemon=True).start()
    except OSError:  # it listens no more
        while True:
            signal.pause()
"""


# An engine that does what a prompt says. It writes each prompt to ./asked, and its own id to
# ./engines when it starts.
ENGINE = """
import sys
SERVE
waiting = set()
def first_time(what):
    if os.path.exists(what):
        return False
    open(what, "w").close()
    return True
def complete(payload):
    global sick
    question = payload["messages"][0]["content"]
    with open("asked", "a") as asked:
        asked.write(f"{os.getpid()} {question}\\n")
    if question == "die" or (question == "die once" and first_time("died")):
        os._exit(41)
    if question == "sick once" and first_time("was sick"):
        sick = 500
    if question == "stop listening once" and first_time("stopped listening"):
        listener.shutdown(socket.SHUT_RDWR)
        time.sleep(600)
    if question.startswith("wait"):
        waiting.add(question)
        while not os.path.exists("gate"):
            time.sleep(0.01)
        waiting.discard(question)
    if sick != 200:
        return 500, {"error": "EngineDeadError"}
    message = {"content": f"{os.getpid()} says {question}"}
    return 200, {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {}}
def drain():
    while waiting:
        time.sleep(0.05)
    os._exit(0)
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=drain).start())
listener = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
with open("engines", "a") as engines:
    engines.write(f"{os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES', '-')}\\n")
print("serving", flush=True)
accept(listener)
""".replace("SERVE\n", SERVE)


def asked():
    return (
        Counter(line.partition(" ")[2] for line in lines("asked"))
        if Path("asked").exists()
        else Counter()
    )


def engines():
    return [int(line.split()[0]) for line in lines("engines")] if Path("engines").exists() else []


def lines(name):
    return Path(name).read_text().splitlines()


# A vLLM in two parts that find each other on the master port. The first part ends when the other
# one is lost. It answers by itself, or asks the server that COUNTING_SERVER names.
TWO_PART_VLLM = f"""#!{sys.executable}
import os, socket, sys, threading, time, urllib.request
value = lambda name: sys.argv[sys.argv.index(name) + 1]
master = (value("--master-addr"), int(value("--master-port")))
with open("parts", "a") as parts:
    parts.write(f"{{os.getpid()}} {{value('--node-rank')}}\\n")
if "--headless" in sys.argv:
    while True:
        try:
            line = socket.create_connection(master)
            break
        except OSError:
            time.sleep(0.02)
    line.recv(1)
    time.sleep(600)
with socket.create_server(master) as listener:
    line = listener.accept()[0]
def end_with_the_other_part():
    try:
        line.recv(1)
    finally:
        os._exit(43)
threading.Thread(target=end_with_the_other_part, daemon=True).start()
def complete(payload):
    question = payload["messages"][0]["content"]
    while question.startswith("wait") and not os.path.exists("gate"):
        time.sleep(0.01)
    if "COUNTING_SERVER" in os.environ:
        url = os.environ["COUNTING_SERVER"] + "/v1/chat/completions"
        asked = urllib.request.Request(url, json.dumps(payload).encode(), {{"Content-Type": "application/json"}})
        return 200, json.load(urllib.request.urlopen(asked))
    return 200, {{"choices": [{{"message": {{"content": question}}, "finish_reason": "stop"}}]}}
{SERVE}
accept(socket.create_server(("127.0.0.1", int(value("--port")))))
"""


# Its answers are the same whoever gives them. It notes which engines are alive when it starts.
SCRIPT = ENGINE.replace('f"{os.getpid()} says', 'f"says').replace(
    'with open("engines", "a")',
    """others = open("engines").read().split() if os.path.exists("engines") else []
with open("alive", "a") as alive:
    alive.write(f"{sum(os.path.exists('/proc/' + pid) for pid in others[::2])}\\n")
with open("engines", "a")""",
)


def runner(folder="job", rollout=jobs.ask, **settings):
    settings = {"server_type": "custom", "server_stop_timeout_sec": 5.0, **settings}
    if settings["server_type"] == "custom":
        settings.setdefault("model_kwargs", {"server_script": "engine.py"})
    config = InferenceConfig(model_name_or_path="m", **settings)
    # Absolute, because fsspec keeps one file system for equal paths, and each test has another
    # working directory.
    return jobs.runner(Path(folder).absolute(), config, rollout)


def run(rank, *texts, **settings):
    documents = [
        Document(text=text, id=f"{rank}-{index}") for index, text in enumerate(texts or ("a", "b"))
    ]
    runner(**settings).run(documents, rank, 9)

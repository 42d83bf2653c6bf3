"""datatrove's "custom" server:

`python serve.py --port N --command JSON` becomes that command, with PORT replaced.
"""

import argparse
import json
import os


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", required=True)
    parser.add_argument("--command", type=json.loads, required=True)
    given = parser.parse_args()
    command = [given.port if part == "PORT" else part for part in given.command]
    # Not a child: datatrove ends this process, and knows of no other.
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()

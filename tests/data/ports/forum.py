import re

EXTRACT = "Extract all math problems from this discussion, as 'Problem 1: ...'.\n\n"


async def extract(document, generate):
    question = {"role": "user", "content": EXTRACT + document.text}
    answer = await generate({"messages": [question], "temperature": 0})
    return [{"problem": problem.strip()} for problem in re.findall(r"Problem \d+: (.*)", answer.text)]

BEFORE_A_QUESTION = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n"


async def instruction(document, generate):
    sampling = {"temperature": 1.0, "seed": int(document.id), "stop": ["<|eot_id|>"], "max_tokens": 2048}
    answer = await generate({"prompt": BEFORE_A_QUESTION, **sampling})
    return answer.text.strip()

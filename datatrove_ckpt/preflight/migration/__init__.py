"""Takes over an interrupted run of datatrove's own ``InferenceRunner`` (0.7 to 0.10).

Start reading at ``job`` (``migrate``). ``theirs`` finds what datatrove's runner left of each rank, ``rows`` reads its
files, ``judgement`` compares them with the input, and ``building`` makes a checkpoint of ours of it. Nothing of
datatrove's is trusted that the input does not confirm, document by document: datatrove marks chunks as finished whose
files lack documents, and keeps no record of the number of tasks, of the model or of the size of a chunk.

A rank is taken over in one step, the rename of its new folder into place:

    crash                                           the next ``migrate``
    before anything of datatrove's is moved         makes the folder anew
    between that and the rename                     finds it in the folder "datatrove", and makes the rank's folder anew
    after the rename, before output is moved aside  finds the names in migrated.json, and moves the files
"""

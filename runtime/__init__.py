"""Requests, scheduling, models and sampling: from a prompt to an answer.

    processing    text -> Request, and what the core tells -> RequestOutput
    scheduler     waiting and running sequences -> StepPlan, and its results -> outputs
    model_runner  StepPlan -> tensors -> model -> sampled tokens
    core          plan, run, commit
    core_thread   the core on a thread of its own
    engine, async_engine   the two faces

Knows nothing of HTTP, wire formats or the frontend language.
"""

"""OpenAI's HTTP interface before an engine: completions, chat, models, health and metrics.

One thread with an asyncio loop; the engine's thread hands it events through one inbox, and one more thread turns texts into tokens.
Nothing here computes. Engines are met as `kvstore.worker.requests.Serving` only.

    fields.py      reads typed fields out of a request's JSON, and refuses what it does not know
    asking.py      the two kinds of request as one typed value      prompts.py    that value as requests to the engine
    calls.py       one HTTP request's events, from the engine's thread to the loop
    shapes.py      answers and their pieces in OpenAI's JSON         faults.py     errors in OpenAI's JSON, with their statuses
    app.py         the routes     server.py   the socket, readiness, the orderly end     metrics.py   what Prometheus is shown
    main.py        `build`: where an engine is made for it, and run until a signal
"""

"""A front door for several workers: OpenAI's HTTP interface before them, prompts to some and answers from others.

One thread with an asyncio loop, and no model: it reads of a request only what it needs to have its prompt computed first.

    upstream.py   one HTTP request to a worker          workers.py   which workers there are, how each is, and whose turn it is
    relay.py      a request's way: its prompt to a prefill worker, then itself to a decode worker, and what happens where one dies
    app.py        the routes and metrics                server.py    the socket, and the end
"""

# The daemon alone: no torch, no transformers. Engines run in containers of their own and share its volumes.
# The larger image has the C compiler that builds the index's inner loops; what runs has the wheel only.
FROM python:3.11 AS build
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps -w /wheels .

FROM python:3.11-slim
COPY constraints.txt /tmp/constraints.txt
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels pip install --no-cache-dir -c /tmp/constraints.txt /wheels/*.whl

RUN useradd --uid 1000 kvstore && install -d -o kvstore -g kvstore -m 0770 /run/kvstore /var/lib/kvstore /arena
WORKDIR /var/lib/kvstore
USER kvstore

ENTRYPOINT ["kvstore"]
CMD ["serve"]

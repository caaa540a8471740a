# The daemon alone: no torch, no transformers. Engines run in containers of their own and share its volumes.
FROM python:3.11-slim

WORKDIR /src
COPY . .
RUN pip install --no-cache-dir -c constraints.txt . && rm -rf /src/build

RUN useradd --uid 1000 kvstore && install -d -o kvstore -g kvstore -m 0770 /run/kvstore /var/lib/kvstore /arena
WORKDIR /var/lib/kvstore
USER kvstore

ENTRYPOINT ["kvstore"]
CMD ["serve"]

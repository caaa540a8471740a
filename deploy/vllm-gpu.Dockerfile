# vLLM on a GPU, with the store's connector, over an image of vLLM's own.
ARG VLLM=vllm/vllm-openai:v0.32.0
FROM ${VLLM}

WORKDIR /src
COPY tests/engines/requirements-kvstore.txt tests/engines/
RUN pip install --no-cache-dir -r tests/engines/requirements-kvstore.txt
COPY . .
RUN pip install --no-cache-dir --no-deps . && rm -rf /src/build

RUN (id 1000 || useradd --uid 1000 kvstore) && install -d -o 1000 -g 1000 -m 0770 /run/kvstore /arena /models
WORKDIR /tmp
USER 1000

ENTRYPOINT ["python3", "-m", "vllm.entrypoints.openai.api_server"]

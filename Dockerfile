# A CPU image:
#   docker build -t hotbed --build-arg PIP_EXTRA_INDEX_URL=<the index of torch's CPU wheels> .
#   docker run --rm -v "$PWD:/work" hotbed train --out /work/runs/demo
# Without the argument pip takes torch's usual wheel, which brings several GB of CUDA libraries.
FROM python:3.11-slim
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY hotbed hotbed
RUN pip install --no-cache-dir -c constraints.txt '.[serve,onnx,tensorboard]'
WORKDIR /work
ENTRYPOINT ["hotbed"]

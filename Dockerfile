# One image for the controller, the load test and the simulator: `tunewright` is its entry point.
# It is filled from requirements.lock and this source tree alone: nothing of vLLM or CUDA is in it.
FROM python:3.11-slim AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/tunewright
WORKDIR /src
COPY requirements.lock ./
RUN /opt/tunewright/bin/pip install -q --require-hashes -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY agent ./agent
RUN /opt/tunewright/bin/pip install -q --no-deps .

FROM python:3.11-slim
RUN groupadd --gid 65532 tunewright && useradd --uid 65532 --gid 65532 --create-home tunewright
COPY --from=build /opt/tunewright /opt/tunewright
ENV PATH=/opt/tunewright/bin:$PATH PYTHONUNBUFFERED=1
USER 65532:65532
WORKDIR /home/tunewright
ENTRYPOINT ["tunewright"]
CMD ["--help"]

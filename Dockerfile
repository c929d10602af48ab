# docker build -t bfl-bench .                          bfl-run with the versions of this release
# docker run --rm -v "$PWD/outputs:/work/outputs" bfl-bench method=fola rounds=5
# docker build --target ci -t bfl-bench-ci . && docker run --rm bfl-bench-ci       everything that CI does

FROM python:3.11-slim AS ci
RUN apt-get update && apt-get install --no-install-recommends --yes git && rm -rf /var/lib/apt/lists/*
COPY . /source
WORKDIR /source
RUN git config --global --add safe.directory '*'
CMD ["bash", ".ci/run"]

FROM python:3.11-slim
COPY . /source
RUN pip install --no-cache-dir --constraint /source/constraints.txt /source && rm -rf /source
WORKDIR /work
ENTRYPOINT ["bfl-run"]

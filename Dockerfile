# Two stages: one that builds with the pinned lock file, one that holds the program and nothing it was built with.
#
#   docker build -t tollgate .
#   docker run --rm -p 8080:8080 -v ./my-config:/etc/tollgate/config:ro tollgate

FROM rust:1.95-slim-bookworm AS build
WORKDIR /src
# `.dockerignore` keeps this to what the build reads. It leaves out rust-toolchain.toml: the image's own compiler is the
# one to use, and rustup would otherwise download another.
COPY . .
# The caches stay with the builder, not in a layer; so the program is copied out of `target` in the same step.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --release --locked --bin tollgate \
    && cp target/release/tollgate /usr/local/bin/tollgate

FROM debian:bookworm-slim
# The roots that https:// upstreams are checked against.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --system --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin tollgate
COPY --from=build /usr/local/bin/tollgate /usr/local/bin/tollgate

# `tollgate serve` reads ./config, so a directory mounted at /etc/tollgate/config is found without an option.
WORKDIR /etc/tollgate
USER tollgate
EXPOSE 8080
STOPSIGNAL SIGTERM

# /livez needs no token. bash opens the connection itself, so the image carries no curl. It asks the default admin port:
# whoever moves that port replaces this check, and `tollgate echo`, which has no admin listener, switches it off.
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s --retries=3 CMD ["bash", "-c", \
    "exec 3<>/dev/tcp/127.0.0.1/9090 && printf 'GET /livez HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n' >&3 && read -r _ code _ <&3 && [ \"$code\" = 200 ]"]

ENTRYPOINT ["tollgate"]
CMD ["serve"]

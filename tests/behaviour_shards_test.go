package tests

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/httplimit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// Callers who meet at one bucket of each shard share exactly what it holds.
func TestShards_ExactCounts(t *testing.T) {
	t.Parallel()
	s := newShards(t)
	limiter := s.limiter(nil)
	const capacity, callers = 100, 16
	for _, p := range []client.Policy{{Name: "user", Capacity: capacity}, {Name: "endpoint", Capacity: capacity}, {Name: "ephemeral", Capacity: capacity, Durable: client.No}} {
		p.Refill, p.Every = client.Zero, second
		require.NoError(t, limiter.DefinePolicy(t.Context(), p))
	}
	var group errgroup.Group
	granted := make([][callers]int64, s.of())
	both := make([][callers]int64, s.of())
	for n := range s.of() {
		key := s.key(n, "hot")
		for caller := range callers {
			group.Go(func() error {
				for range 2 * capacity / callers {
					d, err := limiter.Acquire(t.Context(), "ephemeral", key)
					if err != nil {
						return err
					}
					if d.Allowed {
						granted[n][caller]++
					}
					all, err := limiter.AcquireAll(t.Context(), []client.Charge{{Policy: "user", Key: key}, {Policy: "endpoint", Key: key, Cost: client.Cost(2)}})
					if err != nil {
						return err
					}
					if all.Allowed {
						both[n][caller]++
					}
				}
				return nil
			})
		}
	}
	require.NoError(t, group.Wait())
	sum := func(counts [callers]int64) (sum int64) {
		for _, n := range counts {
			sum += n
		}
		return sum
	}
	for n, db := range s.dbs {
		require.EqualValues(t, capacity, sum(granted[n]), "shard %d", n)
		require.EqualValues(t, capacity/2, sum(both[n]), "shard %d", n)
		key := s.key(n, "hot")
		require.EqualValues(t, 0, db.left("ephemeral", key))
		require.EqualValues(t, capacity/2, db.left("user", key))
		require.EqualValues(t, 0, db.left("endpoint", key))
		require.EqualValues(t, 3, db.number("select (select count(*) from ratelimit.buckets) + (select count(*) from ratelimit.ephemeral_buckets)"),
			"no other shard's key is here")
	}
}

// What docs/sharding.md shows in SQL, JavaScript and Python finds the shards that the client finds.
func TestShards_OneRuleForEveryLanguage(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../client/testdata/shards.json")
	require.NoError(t, err)
	var vectors []struct {
		Key       string
		Of, Shard int
	}
	require.NoError(t, json.Unmarshal(text, &vectors))
	require.GreaterOrEqual(t, len(vectors), 20)
	shown := map[string]string{}
	for _, file := range docsFiles(t) {
		for _, block := range file.blocks {
			if file.path == "docs/sharding.md" && strings.Contains(block.text, "sha256") {
				shown[block.tag] = block.text
			}
		}
	}
	t.Run("SQL", func(t *testing.T) {
		expression := regexp.MustCompile(`(?s)^select (.*) as shard;\n$`).FindStringSubmatch(shown["sql"])
		require.NotNil(t, expression)
		sql := "select " + strings.NewReplacer("'user:42'", "$1::text", "16 - 1", "$2::bigint - 1").Replace(expression[1])
		require.Contains(t, sql, "$1")
		require.Contains(t, sql, "$2")
		for _, encoding := range []string{"UTF8", "LATIN1"} {
			db := createShownDB(t, encoding)
			held := 0
			for _, v := range vectors {
				var shard int
				err := db.QueryRow(t.Context(), sql, v.Key, v.Of).Scan(&shard)
				if encoding != "UTF8" && sqlState(err) == "22P05" { // untranslatable_character
					continue
				}
				require.NoError(t, err)
				require.Equal(t, v.Shard, shard, "%q of %d", v.Key, v.Of)
				held++
			}
			require.GreaterOrEqual(t, held, 20, encoding)
		}
	})
	for tag, program := range map[string]struct{ name, reads string }{
		"js": {"node", `
for (const v of JSON.parse(require("fs").readFileSync(0, "utf8"))) console.log(shardOf(v.key, v.of));`},
		"python": {"python3", `
import json, sys
for v in json.loads(sys.stdin.buffer.read()): print(shard_of(v["key"], v["of"]))`},
	} {
		t.Run(program.name, func(t *testing.T) {
			path, err := exec.LookPath(program.name)
			if err != nil {
				t.Skip(err)
			}
			require.NotEmpty(t, shown[tag])
			file := filepath.Join(t.TempDir(), "shards")
			require.NoError(t, os.WriteFile(file, []byte(shown[tag]+program.reads), 0o600))
			command := exec.CommandContext(t.Context(), path, file)
			command.Stdin = strings.NewReader(string(text))
			command.Stderr = os.Stderr // a warning is no answer
			out, err := command.Output()
			require.NoError(t, err)
			var want strings.Builder
			for _, v := range vectors {
				fmt.Fprintln(&want, v.Shard)
			}
			require.Equal(t, want.String(), string(out))
		})
	}
}

// createShownDB is a connection to a database of an encoding, that sends UTF-8.
func createShownDB(t *testing.T, encoding string) *pgx.Conn {
	t.Helper()
	db := pgtest.Empty(t, "encoding '"+encoding+"'", "locale 'C'")
	config, err := pgx.ParseConfig(db.URL)
	require.NoError(t, err)
	config.RuntimeParams["client_encoding"] = "UTF8"
	conn, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close(context.Background()) })
	return conn
}

// A database moves to the other server while callers ask, by the steps of docs/sharding.md. No token is granted twice,
// no grant is lost, and each idempotency key is known where the database is now.
func TestShards_ADatabaseMoves(t *testing.T) {
	t.Parallel()
	pgDump := findPgDump(t)
	s := newShards(t)
	const moves = 5 // shard 5, from the second server to the first
	var address address
	address.moveTo(s.dbs[moves].URL)
	config := address.config(t)
	config.AfterConnect = client.CheckShard(moves, s.of())
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer pool.Close()
	limiter := s.limiter(map[int]*pgxpool.Pool{moves: pool})
	ledger := newLedger(s.dbs[0], "p", 3_000, 2*time.Second)
	require.NoError(t, limiter.DefinePolicy(t.Context(), client.Policy{Name: "p", Capacity: ledger.capacity, Refill: 1, Every: aDay}))
	require.NoError(t, limiter.DefinePolicy(t.Context(), client.Policy{Name: "jobs", Capacity: 100, Refill: 1, Every: aDay}))
	job := s.key(moves, "job")
	granted, err := limiter.Acquire(t.Context(), "jobs", job, client.Cost(60), client.IdempotencyKey("estimate"))
	require.NoError(t, err)
	load := ledger.load(t, limiter)
	ledger.awaitAnswers(t, 500)
	from, to := s.serverOf(moves), s.servers[0]
	onServer(t, from, "", "alter database "+shardName(moves)+" allow_connections false")
	require.Eventually(t, func() bool {
		conn := connect(t, from)
		_, err := conn.Exec(t.Context(), "select pg_terminate_backend(pid) from pg_stat_activity where datname = $1", shardName(moves))
		require.NoError(t, err)
		_, err = conn.Exec(t.Context(), "alter database "+shardName(moves)+" rename to moved")
		require.Contains(t, []string{"", "55006"}, sqlState(err)) // object_in_use: a session is still ending
		require.NoError(t, conn.Close(t.Context()))
		return err == nil
	}, patience, 10*ms)
	onServer(t, from, "", "alter database moved allow_connections true")
	ledger.awaitFailures(t, 20)
	file := filepath.Join(t.TempDir(), "dump.sql")
	require.NoError(t, os.WriteFile(file, []byte(dump(t, pgDump, from.URL("moved"))), 0o600))
	onServer(t, to, "", "create database "+shardName(moves)+" template template0")
	out, err := runPsql(t, to.URL(shardName(moves)), "--set", "ON_ERROR_STOP=1", "--quiet", "--file", file)
	require.NoError(t, err, out)
	s.dbs[moves] = openDB(t, to, shardName(moves))
	address.moveTo(s.dbs[moves].URL)
	ledger.awaitAnswers(t, 500)
	require.NoError(t, load.end())
	for n, db := range s.dbs {
		require.NoError(t, ledger.of(n, s.of()).check(db), "shard %d", n)
	}
	require.NotZero(t, ledger.failed["3D000"]+ledger.failed["55000"]+ledger.failed["57P01"], "%v", ledger.failed)
	t.Logf("%d grants, %d denials, %d requests without an answer, failed tries by SQLSTATE %v", ledger.granted, ledger.denied, ledger.unknown, ledger.failed)
	again, err := limiter.Acquire(t.Context(), "jobs", job, client.Cost(60), client.IdempotencyKey("estimate"))
	require.NoError(t, err)
	granted.Replayed, granted.ResetAfter, again.ResetAfter = true, 0, 0
	require.Equal(t, granted, again)
	settled, err := limiter.Settle(t.Context(), "jobs", job, "estimate", 10)
	require.NoError(t, err)
	require.EqualValues(t, 90, settled.Remaining)
}

// One database is copied for each shard, and each shard once more, while nobody takes tokens. Every key finds what its bucket
// held, and its idempotency keys.
func TestShards_GrowByCopies(t *testing.T) {
	t.Parallel()
	server := pgtest.Private(t)
	createDB(t, server, "app").Pool.Close()
	app := openDB(t, server, "app")
	app.definePolicy("p", 100, 1, aDay)
	app.definePolicy("q", 100, 1, aDay, ephemeral)
	const keys = 40
	for i := range keys {
		app.acquire("p", fmt.Sprint("user:", i), int64(i), "once")
		app.acquire("q", fmt.Sprint("user:", i), int64(2*i))
	}
	app.Pool.Close()
	names := []string{"app"}
	for of := 2; of <= 4; of *= 2 {
		// From one, two copies; from two, a copy of each.
		var copies []string
		for n := range of {
			copies = append(copies, fmt.Sprint("app_", n, "_of_", of))
			conn, err := pgx.Connect(t.Context(), server.URL(""))
			require.NoError(t, err)
			from := names[n%len(names)]
			_, err = conn.Exec(t.Context(), "select pg_terminate_backend(pid) from pg_stat_activity where datname = $1", from)
			require.NoError(t, err)
			require.Eventually(t, func() bool { // as long as a session is ending
				_, err = conn.Exec(t.Context(), "create database "+copies[n]+" template "+from)
				return sqlState(err) != "55006"
			}, patience, 10*ms)
			require.NoError(t, err)
			require.NoError(t, conn.Close(t.Context()))
			onServer(t, server, copies[n], fmt.Sprintf("truncate ratelimit.shard; select ratelimit_define_shard(%d, %d)", n, of))
		}
		names = copies
		var pools []*pgxpool.Pool
		for _, name := range names {
			pools = append(pools, openDB(t, server, name).Pool)
		}
		limiter, err := client.NewSharded(t.Context(), pools)
		require.NoError(t, err)
		for i := range keys {
			key := fmt.Sprint("user:", i)
			for policy, left := range map[string]int{"p": 100 - i, "q": 100 - 2*i} {
				d, err := limiter.Peek(t.Context(), policy, key)
				require.NoError(t, err)
				require.EqualValues(t, left, d.Remaining, "%s of %d shards", key, of)
			}
			d, err := limiter.Acquire(t.Context(), "p", key, client.Cost(int64(i)), client.IdempotencyKey("once"))
			require.NoError(t, err)
			require.Equal(t, i > 0, d.Replayed) // a cost of 0 is not remembered
		}
		limiter.Close()
		for _, pool := range pools {
			pool.Close()
		}
	}
}

func TestDefineShard(t *testing.T) {
	db := parallelDB(t)
	require.Empty(t, column(t, db.DB, "select shard::text from ratelimit_shard()"))
	for _, bad := range []struct{ shard, of, message, detail string }{
		{"0", "null", "invalid of", "of is null."}, {"0", "0", "invalid of", "of is 0."}, {"0", "-16", "invalid of", "of is -16."},
		{"0", "12", "invalid of", "of is 12."}, {"0", "131072", "invalid of", "of is 131072."},
		{"null", "16", "invalid shard", "shard is null."}, {"-1", "16", "invalid shard", "shard is -1."}, {"16", "16", "invalid shard", "shard is 16."},
	} {
		e := db.refused("22023", "select ratelimit_define_shard("+bad.shard+", "+bad.of+")")
		require.Equal(t, []string{bad.message, bad.detail}, []string{e.Message, e.Detail})
		require.NotEmpty(t, e.Hint)
	}
	require.Empty(t, column(t, db.DB, "select shard::text from ratelimit_shard()"))
	// Of several at a time one wins, and the others are told.
	refused := make([]error, 8)
	crowd(t, len(refused), func(n int) error {
		_, refused[n] = db.Pool.Exec(context.Background(), "select ratelimit_define_shard($1, 8)", n)
		return nil
	})
	is := db.number("select shard from ratelimit_shard()")
	for n, err := range refused {
		if int64(n) == is {
			require.NoError(t, err)
			continue
		}
		require.Equal(t, "22023", sqlState(err))
		require.Equal(t, fmt.Sprintf("Database %s is shard %d of 8 already.", db.Name, is), pgError(err).Detail)
	}
	db.exec("select ratelimit_define_shard($1, 8)", is)
	db.refused("22023", "select ratelimit_define_shard($1, 16)", is)
	require.Equal(t, []string{fmt.Sprintf("(%d,8)", is)}, column(t, db.DB, "select ratelimit_shard()::text"))
	db.refused("23505", "insert into ratelimit.shard values (0, 8)") // there is one row, whoever writes it
}

// Middleware stands on shards as on one database: requests that a shard which is down would decide get what was chosen.
func TestShards_BehindMiddleware(t *testing.T) {
	db := parallelDB(t)
	db.exec("select ratelimit_define_shard(0, 2)")
	config, err := pgxpool.ParseConfig("postgres://127.0.0.1:1/nowhere")
	require.NoError(t, err)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer pool.Close()
	limiter, err := client.NewSharded(t.Context(), []*pgxpool.Pool{db.Pool, pool})
	require.NoError(t, err)
	defer limiter.Close()
	require.Error(t, limiter.DefinePolicy(t.Context(), client.Policy{Name: "api", Capacity: 10, Refill: 1, Every: aDay}), "on one of them")
	byUser := func(r *http.Request) string { return r.Header.Get("User") }
	handler := httplimit.New(limiter, httplimit.Per("api", byUser), httplimit.Closed(second))(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	for i := range 32 {
		user := fmt.Sprint("user:", i)
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Header.Set("User", user)
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		if client.ShardOf(user, 2) == 0 {
			require.Equal(t, http.StatusOK, w.Code)
			require.Equal(t, `"api";r=9;t=86400`, w.Header().Get("RateLimit"))
		} else {
			require.Equal(t, http.StatusServiceUnavailable, w.Code)
		}
	}
}

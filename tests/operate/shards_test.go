package operate

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// The SQL of docs/sharding.md finds the shards that the client finds.
func TestShards_SQLFindsTheShardsOfTheClient(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	text := kit.NoError(os.ReadFile("../../client/testdata/shards.json"))(t)
	var vectors []struct {
		Key       string
		Of, Shard int
	}
	require.NoError(t, json.Unmarshal(text, &vectors))
	require.GreaterOrEqual(t, len(vectors), 20)
	page := kit.NoError(os.ReadFile("../../docs/sharding.md"))(t)
	expression := regexp.MustCompile(`(?m)^select (.*sha256.*) as shard;$`).FindSubmatch(page)
	require.NotNil(t, expression)
	sql := "select " + strings.NewReplacer("'user:42'", "$1::text", "16 - 1", "$2::bigint - 1").Replace(string(expression[1]))
	require.Contains(t, sql, "$1")
	require.Contains(t, sql, "$2")
	for _, encoding := range []string{"UTF8", "LATIN1"} {
		db := pgtest.Empty(t, "encoding '"+encoding+"'", "locale 'C'").Connect(t, func(config *pgx.ConnConfig) {
			config.RuntimeParams["client_encoding"] = "UTF8" // pgx leaves it to the database
		})
		held := 0
		for _, v := range vectors {
			var shard int
			err := db.QueryRow(t.Context(), sql, v.Key, v.Of).Scan(&shard)
			if encoding != "UTF8" && kit.SQLState(err) == "22P05" { // untranslatable_character
				continue
			}
			require.NoError(t, err)
			require.Equal(t, v.Shard, shard, "%q of %d", v.Key, v.Of)
			held++
		}
		require.GreaterOrEqual(t, held, 20, encoding)
	}
}

// A database moves to the other server while callers ask, by the steps of docs/sharding.md. No token is granted twice,
// no grant is lost, and each idempotency key is known where the database is now.
func TestShards_ADatabaseMoves(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	kit.FindPgDump(t)
	s := kit.NewShards(t)
	const moves = 5 // shard 5, from the second server to the first
	var address kit.Address
	address.MoveTo(s.Dbs[moves].URL)
	config := address.Config(t)
	config.AfterConnect = client.CheckShard(moves, s.Of())
	limiter := s.Limiter(map[int]*pgxpool.Pool{moves: kit.OpenPool(t, config)})
	ledger := kit.NewLedger(s.Dbs[0], "p", 3_000, 2*time.Second)
	require.NoError(t, limiter.DefinePolicy(t.Context(), client.Policy{Name: "p", Capacity: ledger.Capacity, Refill: 1, Every: kit.ADay}))
	require.NoError(t, limiter.DefinePolicy(t.Context(), client.Policy{Name: "jobs", Capacity: 100, Refill: 1, Every: kit.ADay}))
	job := s.Key(moves, "job")
	granted := kit.NoError(limiter.Acquire(t.Context(), "jobs", job, client.Cost(60), client.IdempotencyKey("estimate")))(t)
	load := ledger.Load(t, limiter)
	ledger.AwaitAnswers(t, 500)
	from, to := s.ServerOf(moves), s.Servers[0]
	kit.OnServer(t, from, "", "alter database "+kit.ShardName(moves)+" allow_connections false")
	require.Eventually(t, func() bool {
		conn := kit.Connect(t, from)
		_, err := conn.Exec(t.Context(), "select pg_terminate_backend(pid) from pg_stat_activity where datname = $1", kit.ShardName(moves))
		require.NoError(t, err)
		_, err = conn.Exec(t.Context(), "alter database "+kit.ShardName(moves)+" rename to moved")
		require.Contains(t, []string{"", "55006"}, kit.SQLState(err)) // object_in_use: a session is still ending
		require.NoError(t, conn.Close(t.Context()))
		return err == nil
	}, kit.Patience, 10*kit.Ms)
	kit.OnServer(t, from, "", "alter database moved allow_connections true")
	ledger.AwaitFailures(t, 20)
	kit.OnServer(t, to, "", "create database "+kit.ShardName(moves)+" template template0")
	kit.Restore(t, from.URL("moved"), to.URL(kit.ShardName(moves)))
	s.Dbs[moves] = kit.OpenDB(t, to, kit.ShardName(moves))
	address.MoveTo(s.Dbs[moves].URL)
	ledger.AwaitAnswers(t, 500)
	require.NoError(t, load.End())
	for n, db := range s.Dbs {
		require.NoError(t, ledger.Of(n, s.Of()).Check(db), "shard %d", n)
	}
	require.NotZero(t, ledger.Failed["3D000"]+ledger.Failed["55000"]+ledger.Failed["57P01"], "%v", ledger.Failed)
	t.Logf("%d grants, %d denials, %d requests without an answer, failed tries by SQLSTATE %v", ledger.Granted, ledger.Denied, ledger.Unknown, ledger.Failed)
	again := kit.NoError(limiter.Acquire(t.Context(), "jobs", job, client.Cost(60), client.IdempotencyKey("estimate")))(t)
	granted.Replayed, granted.ResetAfter, again.ResetAfter = true, 0, 0
	require.Equal(t, granted, again)
	require.EqualValues(t, 90, kit.NoError(limiter.On(job).Settle(t.Context(), "jobs", job, "estimate", 10))(t).Remaining)
}

// One database is copied for each shard, and each shard once more. Every key finds what its bucket held, and its idempotency keys.
func TestShards_GrowByCopies(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	server := pgtest.Private(t)
	kit.CreateDB(t, server, "app").Pool.Close()
	app := kit.OpenDB(t, server, "app")
	app.DefinePolicy("p", 100, 1, kit.ADay)
	app.DefinePolicy("q", 100, 1, kit.ADay, kit.Ephemeral)
	const keys = 40
	for i := range keys {
		app.Acquire("p", fmt.Sprint("user:", i), int64(i), "once")
		app.Acquire("q", fmt.Sprint("user:", i), int64(2*i))
	}
	app.Pool.Close()
	names := []string{"app"}
	for of := 2; of <= 4; of *= 2 {
		// From one, two copies; from two, a copy of each.
		var copies []string
		for n := range of {
			copies = append(copies, fmt.Sprint("app_", n, "_of_", of))
			conn := kit.NoError(pgx.Connect(t.Context(), server.URL("")))(t)
			from := names[n%len(names)]
			_, err := conn.Exec(t.Context(), "select pg_terminate_backend(pid) from pg_stat_activity where datname = $1", from)
			require.NoError(t, err)
			require.Eventually(t, func() bool { // as long as a session is ending
				_, err := conn.Exec(t.Context(), "create database "+copies[n]+" template "+from)
				return kit.SQLState(err) != "55006"
			}, kit.Patience, 10*kit.Ms)
			require.NoError(t, err)
			require.NoError(t, conn.Close(t.Context()))
			kit.OnServer(t, server, copies[n], fmt.Sprintf("truncate ratelimit.shard; select ratelimit_define_shard(%d, %d)", n, of))
		}
		names = copies
		var pools []*pgxpool.Pool
		for _, name := range names {
			pools = append(pools, kit.OpenDB(t, server, name).Pool)
		}
		limiter := kit.NoError(client.NewSharded(t.Context(), pools))(t)
		for i := range keys {
			key := fmt.Sprint("user:", i)
			for policy, left := range map[string]int{"p": 100 - i, "q": 100 - 2*i} {
				require.EqualValues(t, left, kit.NoError(limiter.On(key).Peek(t.Context(), policy, key))(t).Remaining, "%s of %d shards", key, of)
			}
			d := kit.NoError(limiter.Acquire(t.Context(), "p", key, client.Cost(int64(i)), client.IdempotencyKey("once")))(t)
			require.Equal(t, i > 0, d.Replayed) // a cost of 0 is not remembered
		}
		limiter.Close()
		for _, pool := range pools {
			pool.Close()
		}
	}
}

func TestDefineShard_NumbersADatabaseOnce(t *testing.T) {
	db := kit.ParallelDB(t)
	require.Empty(t, kit.Column(t, db.DB, "select shard::text from ratelimit_shard()"))
	for _, bad := range []struct{ shard, of, message, detail string }{
		{"0", "null", "invalid of", "of is null."}, {"0", "0", "invalid of", "of is 0."}, {"0", "-16", "invalid of", "of is -16."},
		{"0", "12", "invalid of", "of is 12."}, {"0", "131072", "invalid of", "of is 131072."},
		{"null", "16", "invalid shard", "shard is null."}, {"-1", "16", "invalid shard", "shard is -1."}, {"16", "16", "invalid shard", "shard is 16."},
	} {
		e := db.Refused("22023", "select ratelimit_define_shard("+bad.shard+", "+bad.of+")")
		require.Equal(t, []string{bad.message, bad.detail}, []string{e.Message, e.Detail})
		require.NotEmpty(t, e.Hint)
	}
	require.Empty(t, kit.Column(t, db.DB, "select shard::text from ratelimit_shard()"))
	// Of several at a time one wins, and the others are told.
	refused := make([]error, 8)
	kit.Crowd(t, len(refused), func(n int) error {
		_, refused[n] = db.Pool.Exec(context.Background(), "select ratelimit_define_shard($1, 8)", n)
		return nil
	})
	is := db.Number("select shard from ratelimit_shard()")
	for n, err := range refused {
		if int64(n) == is {
			require.NoError(t, err)
			continue
		}
		require.Equal(t, "22023", kit.SQLState(err))
		require.Equal(t, fmt.Sprintf("Database %s is shard %d of 8 already.", db.Name, is), kit.PgError(err).Detail)
	}
	db.Execute("select ratelimit_define_shard($1, 8)", is)
	_ = db.Refused("22023", "select ratelimit_define_shard($1, 16)", is)
	require.Equal(t, []string{fmt.Sprintf("(%d,8)", is)}, kit.Column(t, db.DB, "select ratelimit_shard()::text"))
	_ = db.Refused("23505", "insert into ratelimit.shard values (0, 8)") // there is one row, whoever writes it
}

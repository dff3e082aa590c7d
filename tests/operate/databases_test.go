package operate

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// newDBWith is newDB with options of CREATE DATABASE. The schema has to be that of every database.
func newDBWith(t *testing.T, options string) *kit.TestDB {
	db := &kit.TestDB{DB: pgtest.Empty(t, options), T: t}
	require.NoError(t, migrations.Up(context.Background(), db.Connect(t)))
	require.Equal(t, kit.FingerprintOf(t, pgtest.New(t)), kit.FingerprintOf(t, db.DB))
	db.Execute("alter database " + db.Name + " set client_encoding = 'UTF8'") // pgx leaves it to the database
	db.Pool.Reset()
	return db
}

// Text that a database can hold is a policy or a key there, and other text is an error that changes nothing. Callers speak UTF-8, as Go does.
func TestDatabase_OfAnyEncoding(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ encoding, held, refused string }{
		{"LATIN1", "é", "語"},
		{"EUC_JP", "語", "🚦"},
		{"WIN1251", "ж", "é"},
		{"SQL_ASCII", "🚦", ""}, // holds any bytes
		{"UTF8", "🚦", ""},
	} {
		t.Run(test.encoding, func(t *testing.T) {
			t.Parallel()
			db := newDBWith(t, "encoding '"+test.encoding+"' locale 'C'")
			holds := func(text string) bool {
				_, err := db.Pool.Exec(t.Context(), "select $1::text", text)
				if err != nil {
					require.Equal(t, "22P05", kit.SQLState(err), "%q: %v", text, err)
				}
				return err == nil
			}
			require.True(t, holds(test.held))
			require.True(t, test.refused == "" || !holds(test.refused))
			for _, mode := range kit.Protocols {
				q := kit.InMode{Conn: db.Connect(t), Mode: mode}
				policy := test.held + mode.String()
				db.DefinePolicy(policy, 1000, 1, kit.ADay)
				cost := int64(0)
				for _, key := range append(kit.OddTexts, test.held+test.held) {
					if !holds(key) {
						for _, args := range [][]string{{policy, key, "i"}, {key, "k", "i"}, {policy, "k", key}} {
							_, err := kit.Acquire(q, args[0], args[1], 1, args[2])
							require.Equal(t, "22P05", kit.SQLState(err), "%q: %v", args, err)
						}
						continue
					}
					cost++
					require.EqualValues(t, 1000-cost, db.Must(kit.Acquire(q, policy, key, cost, key)).Remaining, "%q is a bucket of its own", key)
					require.True(t, db.Must(kit.Acquire(q, policy, key, cost, key)).Replayed)
					require.EqualValues(t, 1000-cost, db.Must(kit.Peek(q, policy, key, 1)).Remaining)
				}
				require.EqualValues(t, 1000, db.Left(policy, "k"))
				require.EqualValues(t, cost, db.Number("select count(*) from ratelimit.buckets"), "none for what was refused")
				require.EqualValues(t, cost, db.Number("select count(*) from ratelimit.idempotency_keys"))
				db.DropPolicy(policy)
			}
			_, err := kit.Acquire(db.Pool, "no "+test.held, "k", 1)
			require.Equal(t, "RL001", kit.SQLState(err))
			require.ErrorContains(t, client.New(db.Pool).DropPolicy(t.Context(), "no "+test.held), "'no "+test.held+"'", "an error tells the text as it was")
		})
	}
}

// The limit of 512 bytes counts bytes in the database's encoding, which Go cannot know.
func TestDatabase_CountsItsOwnBytes(t *testing.T) {
	t.Parallel()
	db := newDBWith(t, "encoding 'LATIN1' locale 'C'")
	db.DefinePolicy("p", 10, 1, kit.ADay)
	combiner := client.NewCombiner(db.Pool)
	defer combiner.Close()
	for _, limiter := range []client.Acquirer{client.New(db.Pool), combiner} {
		require.True(t, kit.NoError(limiter.Acquire(t.Context(), "p", strings.Repeat("é", 512)))(t).Allowed)
		_, err := limiter.Acquire(t.Context(), "p", strings.Repeat("é", 513))
		require.ErrorIs(t, err, client.ErrInvalidArgument)
		require.Equal(t, "22023", kit.SQLState(err))
		_, err = limiter.Acquire(t.Context(), "p", "語")
		require.ErrorIs(t, err, client.ErrInvalidArgument)
		require.Equal(t, "22P05", kit.SQLState(err))
	}
	require.EqualValues(t, 8, db.Left("p", strings.Repeat("é", 512)))
}

// Keys are compared by byte, whatever the collation of the database.
func TestDatabase_OfAnyCollation(t *testing.T) {
	t.Parallel()
	locales := map[string]string{
		"C":             "locale 'C'",
		"ICU, Turkish":  "encoding 'UTF8' locale_provider icu icu_locale 'tr' locale 'C'",
		"ICU, careless": "encoding 'UTF8' locale_provider icu icu_locale 'und-u-ks-level1-ka-shifted' locale 'C'",
	}
	for name, options := range locales {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if strings.HasPrefix(name, "ICU") && len(kit.Column(t, pgtest.Empty(t), "select collname from pg_collation where collname = 'und-x-icu'")) == 0 {
				t.Skip("the server was built without ICU")
			}
			db := newDBWith(t, options)
			texts := []string{"key", "KEY", "Key", "k ey", "kéy", "ke\u0301y", "i", "I", "İ", "ı", "ß", "ss"}
			db.Execute("create table asked (policy text, key text)") // in the database's collation
			for _, text := range texts {
				db.Execute("insert into asked values ($1, $1)", text)
			}
			db.Execute("select ratelimit_define_policy(a.policy, 10, 1, '1 day', durable => a.key < 'k') from asked as a")
			require.Equal(t, slices.Sorted(slices.Values(texts)), kit.Column(t, db.DB, "select policy from ratelimit_policies()"), "by byte")
			for range 2 {
				db.Execute("select ratelimit_acquire(a.policy, b.key, 3, b.key) from asked as a, asked as b") // the second time replays
			}
			db.Execute("select ratelimit_acquire_many(array_agg(a.policy), array_agg(b.key)) from asked as a, asked as b")
			db.Execute("select ratelimit_refund(a.policy, a.key, 1) from asked as a")
			for _, policy := range texts {
				for _, key := range texts {
					want := int64(10 - 3 - 1)
					if policy == key {
						want++
					}
					require.Equal(t, want, db.Left(policy, key), "%q %q", policy, key)
				}
			}
			db.Execute("select ratelimit_reset(a.policy, a.key) from asked as a")
			n := int64(len(texts))
			require.EqualValues(t, n*n-n, db.Number("select count(*) from (table ratelimit.buckets union all table ratelimit.ephemeral_buckets) as b"))
			db.Execute("select ratelimit_drop_policy(a.policy) from asked as a")
			db.Cleanup()
		})
	}
}

package tests

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestHOT_UpdatesAreHeapOnly(t *testing.T) {
	t.Parallel()
	const connections, each = 4, 25_000
	// On a server of its own: a transaction that is open in any of its databases keeps old row
	// versions from being pruned, and updates without room on their page are not HOT.
	db, _ := newPrivateDB(t, "synchronous_commit=off", "autovacuum=off")
	db.definePolicy("p", 1_000_000, 1, aDay)
	db.together(connections, func(i int, _ querier) (d decision, err error) {
		_, err = db.Pool.Exec(context.Background(), fmt.Sprintf(`do $$ begin
			for i in 1..%d loop
				perform ratelimit_acquire('p', 'k' || i * %d %% 1000);
				commit;
			end loop;
			perform pg_stat_force_next_flush();
		end $$`, each, 2*i+1))
		return d, err
	})

	taken := db.number("select sum(1000000 - level / 1000000)::bigint from ratelimit.buckets")
	require.EqualValues(t, connections*each, taken)
	updates := db.number("select n_tup_upd from pg_stat_user_tables where relid = 'ratelimit.buckets'::regclass")
	hot := db.number("select n_tup_hot_upd from pg_stat_user_tables where relid = 'ratelimit.buckets'::regclass")
	require.Greater(t, updates, int64(connections*each-5000))
	require.GreaterOrEqual(t, float64(hot)/float64(updates), 0.95, "%d of %d", hot, updates)
	t.Logf("%d of %d updates were HOT", hot, updates)
}

package tests

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestHOT_UpdatesAreHeapOnly(t *testing.T) {
	t.Parallel()
	const calls = 100_000
	// One session on a server of its own: a transaction that is open, in any of its databases or waiting
	// for a processor, keeps old row versions from being pruned, and updates without room on their page
	// are not HOT.
	db, _ := newPrivateDB(t, "synchronous_commit=off", "autovacuum=off")
	db.definePolicy("p", 1_000_000, 1, aDay)
	db.exec(fmt.Sprintf(`do $$ begin
		for i in 1..%d loop
			perform ratelimit_acquire('p', 'k' || i * 7 %% 1000);
			commit;
		end loop;
		perform pg_stat_force_next_flush();
	end $$`, calls))

	taken := db.number("select sum(1000000 - level / 1000000)::bigint from ratelimit.buckets")
	require.EqualValues(t, calls, taken)
	updates := db.number("select n_tup_upd from pg_stat_user_tables where relid = 'ratelimit.buckets'::regclass")
	hot := db.number("select n_tup_hot_upd from pg_stat_user_tables where relid = 'ratelimit.buckets'::regclass")
	require.EqualValues(t, calls-1000, updates)
	require.Equal(t, updates, hot)
}

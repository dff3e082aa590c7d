package tests

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A batch that waits for a bucket that is being removed takes its buckets in the order of all others
// still, when somebody else has made the bucket anew.
func TestAcquireMany_ABucketRemovedMeanwhileIsTakenInOrder(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	db.definePolicy("p", 10, 1, aDay)
	a, b, policy, cost := "a", "b", "p", int64(1)
	for _, key := range []string{a, b} {
		db.acquire(policy, key, 1)
	}
	both := []wish{{&policy, &a, &cost, nil}, {&policy, &b, &cost, nil}}
	many := func(q querier) (decision, error) {
		_, err := acquireMany(q.(rowsQuerier), both)
		return decision{}, err
	}

	remover, maker := db.begin(), db.begin()
	remover.exec("select ratelimit_reset('p', 'a')")
	keeper := db.begin()
	keeper.acquire(policy, b, 1)
	batch := db.session().start(many)
	batch.awaitBlockedBy(remover)
	remover.exec("commit") // the batch goes on to b
	batch.awaitBlockedBy(keeper)
	maker.acquire(policy, a, 1)
	other := maker.startAcquire(policy, b, 1)
	db.Await(t, patience, "select cardinality(pg_blocking_pids($1)) > 0", maker.PgConn().PID())
	keeper.exec("commit")
	_, err := other.result()
	require.NoError(t, err)
	maker.exec("commit")
	_, err = batch.result()
	require.NoError(t, err)
}

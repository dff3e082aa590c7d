package client_test

import (
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// The Node client has tests of its own.
func TestNode_OwnTests(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	kit.RunNode(t, pgtest.New(t).URL, nil, "npm", "test")
}

// Sessions belong to other clients after each transaction.
func TestNode_PgBouncer(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	db, pooler := pgtest.New(t), pgtest.StartPooler(t)
	t.Log(pooler)
	kit.RunNode(t, pooler.URL(db.Name), nil, "node", "--test", "--test-concurrency=1", "test/vectors.test.js", "test/drivers.test.js")
}

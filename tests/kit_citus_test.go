package tests

import (
	"context"
	"errors"
	"net/url"
	"os"
	"os/exec"
	"path"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// A citus is a cluster: a coordinator and two workers. Databases are made in it one by one.
type citus struct {
	t     testing.TB
	nodes []*pgtest.Server // the coordinator is the first
}

// newCitus starts a cluster of the PostgreSQL that the tests run on. Where that has no Citus, the test is skipped, unless
// RATELIMIT_TEST_CITUS is set, as make test-citus does.
func newCitus(t testing.TB) *citus {
	t.Helper()
	var there bool
	err := openDB(t, pgtest.Shared(t), "").Pool.QueryRow(t.Context(),
		"select exists (select from pg_available_extensions where name = 'citus')").Scan(&there)
	require.NoError(t, err)
	if !there && os.Getenv("RATELIMIT_TEST_CITUS") == "" {
		t.Skip("this PostgreSQL has no Citus: make test-citus runs these tests")
	}
	require.True(t, there, "no Citus in %s: RATELIMIT_PG_BIN names a PostgreSQL that has it", pgtest.Shared(t))
	c := &citus{t: t}
	for range 3 {
		c.nodes = append(c.nodes, pgtest.Private(t, "shared_preload_libraries=citus", "wal_level=logical", "max_prepared_transactions=200",
			"citus.shard_count=8", "citus.enable_statistics_collection=off", "citus.node_connection_timeout=5s"))
	}
	for n, node := range c.nodes { // they connect to themselves, too
		onServer(t, node, "", "alter system set citus.local_hostname = '"+c.nodeName(n)+"'")
		onServer(t, node, "", "select pg_reload_conf()")
	}
	return c
}

// nodeName is what Citus calls a node: the directory of its socket.
func (c *citus) nodeName(n int) string {
	u, err := url.Parse(c.nodes[n].URL(""))
	require.NoError(c.t, err)
	return u.Query().Get("host")
}

// create returns a database of the cluster with the package in it, as each node sees it.
func (c *citus) create(t testing.TB, name string) citusDB {
	db := c.createOn(t, name, len(c.nodes))
	c.install(t, name)
	return db
}

// createOn returns an empty database of a cluster that has as yet no more than the first nodes.
func (c *citus) createOn(t testing.TB, name string, nodes int) (db citusDB) {
	for _, node := range c.nodes {
		onServer(t, node, "", "create database "+name+" template template0")
		onServer(t, node, name, "create extension citus")
	}
	for n := range nodes {
		c.add(t, name, n)
	}
	for _, node := range c.nodes {
		db = append(db, openDB(t, node, name))
	}
	return db
}

// add takes a node into the cluster.
func (c *citus) add(t testing.TB, name string, n int) {
	add := "citus_add_node"
	if n == 0 {
		add = "citus_set_coordinator_host"
	}
	onServer(t, c.nodes[0], name, "select "+add+"('"+c.nodeName(n)+"', 5432)")
}

func (c *citus) install(t testing.TB, name string) { c.make(t, "install-citus", name) }

func (c *citus) make(t testing.TB, target, name string) {
	command := exec.Command("make", "-C", "..", "--no-print-directory", target, "DATABASE_URL="+c.nodes[0].URL(name))
	out, err := command.CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// A citusDB is a database of a cluster, as each node sees it: the coordinator first.
type citusDB []*testDB

func (db citusDB) coordinator() *testDB { return db[0] }

// stopClock lets setClock stop the clock of all nodes.
func (db citusDB) stopClock() {
	db[0].exec("create table public.test_clock (now timestamptz not null, row integer primary key)")
	db[0].exec("select create_reference_table('public.test_clock')")
	db[0].setClock(t0)
}

// in are the same databases for a subtest. Functions are replaced on the coordinator only, and by stopClock.
func (db citusDB) in(t testing.TB) citusDB {
	var all citusDB
	for _, node := range db {
		node = node.in(t)
		node.fixed.Do(func() {})
		all = append(all, node)
	}
	return all
}

// shardOf is the number of the node that has the bucket, and the shard of its table.
func (db citusDB) shardOf(c *citus, key string) (node int, shard int64) {
	var name string
	err := db[0].Pool.QueryRow(context.Background(), `
		select s.shardid, s.nodename
		  from citus_shards as s
		 where s.table_name = 'ratelimit.buckets'::regclass
		   and s.shardid = get_shard_id_for_distribution_column('ratelimit.buckets', $1::text)`, key).Scan(&shard, &name)
	require.NoError(db[0].t, err)
	for n := range c.nodes {
		if path.Clean(c.nodeName(n)) == path.Clean(name) {
			return n, shard
		}
	}
	require.NoError(db[0].t, errors.New("no node "+name))
	return 0, 0
}

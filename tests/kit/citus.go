package kit

import (
	"cmp"
	"context"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

func (db *TestDB) Strings(sql string) []string { return Column(db.T, db.DB, sql) }

// As connects as a role, or as the owner.
func (db *TestDB) As(role string) *pgx.Conn {
	return db.Connect(db.T, func(config *pgx.ConnConfig) { config.User = cmp.Or(role, config.User) })
}

// A Citus is a cluster: a coordinator and two workers. Databases are made in it one by one.
type Citus struct {
	T     testing.TB
	Nodes []*pgtest.Server // the coordinator is the first
	TLS   bool             // between nodes, as Citus has it where they connect by TCP; else they connect by sockets
}

// NewCitus starts a cluster of the PostgreSQL that the tests run on. Where that has no Citus, the test is skipped, unless
// RATELIMIT_TEST_CITUS is set, as make test-citus does.
func NewCitus(t testing.TB, settings ...string) *Citus {
	t.Helper()
	var there bool
	err := OpenDB(t, pgtest.Shared(t), "").Pool.QueryRow(t.Context(),
		"select exists (select from pg_available_extensions where name = 'citus')").Scan(&there)
	require.NoError(t, err)
	if !there && os.Getenv("RATELIMIT_TEST_CITUS") == "" {
		t.Skip("this PostgreSQL has no Citus: make test-citus runs these tests")
	}
	require.True(t, there, "no Citus in %s: RATELIMIT_PG_BIN names a PostgreSQL that has it", pgtest.Shared(t))
	c := &Citus{T: t, TLS: os.Getenv("RATELIMIT_TEST_CITUS") == "tls"}
	for range 3 {
		c.Nodes = append(c.Nodes, pgtest.Private(t, append([]string{"shared_preload_libraries=citus", "wal_level=logical", "max_prepared_transactions=200",
			"citus.shard_count=8", "citus.enable_statistics_collection=off", "citus.node_connection_timeout=5s"}, settings...)...))
	}
	for n, node := range c.Nodes { // they connect to themselves, too
		if c.TLS {
			OnServer(t, node, "", "alter system set listen_addresses = '"+c.NodeName(n)+"'")
			OnServer(t, node, "", "alter system set citus.node_conninfo = 'sslmode=require sslcert=none'") // of this user's HOME it may read nothing
			OnServer(t, node, "", "copy (select 'host all all 127.0.0.0/8 trust') to program 'cat >> pg_hba.conf'")
			Restart(t, node)
		}
		OnServer(t, node, "", "alter system set citus.local_hostname = '"+c.NodeName(n)+"'")
		OnServer(t, node, "", "select pg_reload_conf()")
	}
	return c
}

// NodeName is what Citus calls a node: the directory of its socket, or its address.
func (c *Citus) NodeName(n int) string {
	if c.TLS {
		return fmt.Sprint("127.0.0.", 2+n)
	}
	return NoError(url.Parse(c.Nodes[n].URL("")))(c.T).Query().Get("host")
}

func (c *Citus) Create(t testing.TB, name string) CitusDB {
	db := c.CreateOn(t, name, len(c.Nodes))
	c.Install(t, name)
	return db
}

// CreateOn returns an empty database of a cluster that has as yet no more than the first nodes.
func (c *Citus) CreateOn(t testing.TB, name string, nodes int) (db CitusDB) {
	for _, node := range c.Nodes {
		OnServer(t, node, "", "create database "+name+" template template0")
		OnServer(t, node, name, "create extension citus")
	}
	for n := range nodes {
		c.Add(t, name, n)
	}
	for _, node := range c.Nodes {
		db = append(db, OpenDB(t, node, name))
	}
	return db
}

func (c *Citus) Add(t testing.TB, name string, n int) {
	add := "citus_add_node"
	if n == 0 {
		add = "citus_set_coordinator_host"
	}
	OnServer(t, c.Nodes[0], name, "select "+add+"('"+c.NodeName(n)+"', 5432)")
}

func (c *Citus) Install(t testing.TB, name string) { c.Make(t, "install-citus", name) }

func (c *Citus) Make(t testing.TB, target, name string) {
	out, err := exec.Command("make", "-C", "../..", "--no-print-directory", target, "DATABASE_URL="+c.Nodes[0].URL(name)).CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// A CitusDB is a database of a cluster, as each node sees it: the coordinator first.
type CitusDB []*TestDB

func (db CitusDB) Coordinator() *TestDB { return db[0] }

// StopClock lets SetClock stop the clock of all nodes.
func (db CitusDB) StopClock() {
	db[0].Execute("create table public.test_clock (now timestamptz not null, row integer primary key)")
	db[0].Execute("select create_reference_table('public.test_clock')")
	db[0].SetClock(T0)
}

// MovesDuring moves shards between the workers, those of keys, as long as a load lasts, and returns how often.
func (db CitusDB) MovesDuring(c *Citus, key func() string, load func()) (moves int) {
	over := make(chan struct{})
	go func() { defer close(over); load() }()
	defer func() { <-over }()
	for ; ; moves++ {
		select {
		case <-over:
			return moves
		case <-time.After(Second / 2): // calls are slow after a move
		}
		from, shard := db.ShardOf(c, key())
		db.Coordinator().Execute(c.Move(shard, from, 3-from))
		db.DropWhatMovesLeft()
	}
}

// DropWhatMovesLeft lets shards move back: a call that reads the old placement when a move ends leaves it behind, and a move back fails
// until Citus has dropped it.
func (db CitusDB) DropWhatMovesLeft() {
	for db.Coordinator().Number("select count(*) from pg_dist_cleanup") > 0 {
		db.Coordinator().Execute("call citus_cleanup_orphaned_resources()")
	}
}

func (c *Citus) Move(shard int64, from, to int) string {
	return fmt.Sprintf("select citus_move_shard_placement(%d, '%s', 5432, '%s', 5432, 'block_writes')", shard, c.NodeName(from), c.NodeName(to))
}

// HasMoved tells whether a call failed because its shard moved. It took nothing, and may be made again.
func HasMoved(err error) bool {
	return SQLState(err) == "XX000" && strings.Contains(err.Error(), "the shard has moved")
}

// In are the same databases for a subtest. Functions are replaced on the coordinator only, and by stopClock.
func (db CitusDB) In(t testing.TB) CitusDB {
	var all CitusDB
	for _, node := range db {
		node = node.In(t)
		node.fixed.Do(func() {})
		all = append(all, node)
	}
	return all
}

// ShardOf is the number of the node that has the bucket, and the shard of its table.
func (db CitusDB) ShardOf(c *Citus, key string) (node int, shard int64) {
	var name string
	err := db[0].Pool.QueryRow(context.Background(), `
		select s.shardid, s.nodename
		  from citus_shards as s
		 where s.table_name = 'ratelimit.buckets'::regclass
		   and s.shardid = get_shard_id_for_distribution_column('ratelimit.buckets', $1::text)`, key).Scan(&shard, &name)
	require.NoError(db[0].T, err)
	for n := range c.Nodes {
		if path.Clean(c.NodeName(n)) == path.Clean(name) {
			return n, shard
		}
	}
	require.FailNow(db[0].T, "no node "+name)
	return 0, 0
}

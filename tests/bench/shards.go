package main

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/migrations/packages"
)

// shardsCost compares what a decision costs the servers by the ways in to several databases, with one database. Its cells are named
// shards/way/plain and shards/way/combined.
type shardsCost struct {
	stage
	keys    *keyspace
	servers map[string][]int // by way in: the processes whose CPU time is counted
	acquire map[string]acquirer
}

// waysIn are the rows, with the number of databases that the client routes to. The first is what the others are compared with.
var waysIn = []struct {
	name   string
	shards int // 0 of Citus
}{{"one", 1}, {"client", 4}, {"citus", 0}}

const shardsCallers = 64

func shardsName(way, kind string) string { return "shards/" + way + "/" + kind }

func (*shardsCost) cells() (cells []string) {
	for _, way := range waysIn {
		cells = append(cells, shardsName(way.name, "plain"), shardsName(way.name, "combined"))
	}
	return cells
}

func (s *shardsCost) open(ctx context.Context, cells []string) error {
	s.keys = keyspaces()["uniform"]
	s.servers, s.acquire = map[string][]int{}, map[string]acquirer{}
	for _, way := range waysIn {
		if !strings.Contains(strings.Join(cells, " "), shardsName(way.name, "")) {
			continue
		}
		create := s.shards
		if way.shards == 0 {
			create = s.citus
		}
		urls, servers, err := create(ctx, "shards_"+way.name, way.shards)
		if err != nil {
			return fmt.Errorf("%s: %w", way.name, err)
		}
		s.servers[way.name] = servers
		if err := s.connect(ctx, way.name, urls); err != nil {
			return err
		}
	}
	return nil
}

// connect opens as many connections in all, whatever the number of databases.
func (s *shardsCost) connect(ctx context.Context, way string, urls []string) error {
	var pools []*pgxpool.Pool
	for _, url := range urls {
		pool, err := s.pool(ctx, url, false, int32(connections/len(urls)))
		if err != nil {
			return err
		}
		pools = append(pools, pool)
	}
	plain := make([]acquirer, len(pools))
	for n, pool := range pools {
		plain[n] = pgratelimit(client.New(pool))
	}
	s.acquire[shardsName(way, "plain")] = func(ctx context.Context, key string) error {
		return plain[client.ShardOf(key, len(plain))](ctx, key)
	}
	if len(pools) == 1 {
		s.acquire[shardsName(way, "combined")] = pgratelimit(s.combiner(pools[0]))
		return nil
	}
	sharded, err := client.NewSharded(ctx, pools)
	if err != nil {
		return err
	}
	s.closers = append(s.closers, sharded.Close)
	s.acquire[shardsName(way, "combined")] = pgratelimit(sharded)
	return nil
}

func (s *shardsCost) run(ctx context.Context, cell string) (sample, error) {
	l := load{callers: shardsCallers, keys: s.keys, acquire: s.acquire[cell], servers: s.servers[strings.Split(cell, "/")[1]]}
	return l.run(ctx, s.window)
}

// shards makes as many databases on one server, with the policies, and returns their connection strings. servers are the processes
// whose CPU time, with their children's, is that of the databases.
func (s *shardsCost) shards(ctx context.Context, name string, number int) (urls []string, servers []int, err error) {
	for n := range number {
		database, setUp := fmt.Sprint(name, "_", n), definePolicies()
		if number > 1 {
			setUp = append([]string{fmt.Sprintf("select ratelimit_define_shard(%d, %d)", n, number)}, setUp...)
		}
		pg, err := s.database(ctx, database, setUp...)
		if err != nil {
			return nil, nil, err
		}
		urls, servers = append(urls, pg.URL(database)), []int{pg.pid}
	}
	return urls, servers, nil
}

// citus makes a coordinator, which is asked, and two workers.
func (s *shardsCost) citus(ctx context.Context, name string, _ int) ([]string, []int, error) {
	files, err := packages.All(os.DirFS("."))
	if err != nil {
		return nil, nil, fmt.Errorf("the benchmark is run in the root of the repository: %w", err)
	}
	var coordinator *postgres
	var servers []int
	for n := range 3 {
		node, err := startPostgres(ctx, "shared_preload_libraries=citus", "max_prepared_transactions=200")
		if err != nil {
			return nil, nil, fmt.Errorf("RATELIMIT_PG_BIN has to name a PostgreSQL that has Citus: %w", err)
		}
		s.closers = append(s.closers, func() { _ = node.Close() })
		servers = append(servers, node.pid)
		socket, err := queryRow[string](ctx, node, "", "select split_part(current_setting('unix_socket_directories'), ',', 1)")
		if err != nil {
			return nil, nil, err
		}
		add := "select citus_add_node($1, 5432)"
		if n == 0 {
			coordinator, add = node, "select citus_set_coordinator_host($1, 5432)"
		}
		if err := node.exec(ctx, "", fmt.Sprintf("alter system set citus.local_hostname = '%s'", socket), "select pg_reload_conf()", "create database "+name+" template template0",
			"alter database "+name+" set synchronous_commit = off"); err != nil {
			return nil, nil, err
		}
		if err := node.exec(ctx, name, "create extension citus"); err != nil {
			return nil, nil, err
		}
		if err := coordinator.exec(ctx, name, strings.Replace(add, "$1", "'"+socket+"'", 1)); err != nil {
			return nil, nil, err
		}
	}
	if err := coordinator.psql(ctx, name, string(files["psql/install.sql"])+string(files["citus/citus.sql"])); err != nil {
		return nil, nil, err
	}
	return []string{coordinator.URL(name)}, servers, coordinator.exec(ctx, name, definePolicies()...)
}

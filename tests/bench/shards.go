package main

import (
	"context"
	"fmt"
	"os/exec"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/client"
)

// openShards compares what a decision costs the servers by the ways in to several databases, with one database. As many connections
// are opened in all, whatever the number of databases.
func openShards(ctx context.Context, s *stage, cells []string) (measure, error) {
	all := map[string]opponent{}
	for name, open := range map[string]func(context.Context, *stage) ([]string, []int, error){
		"one":    func(ctx context.Context, s *stage) ([]string, []int, error) { return shards(ctx, s, 1) },
		"client": func(ctx context.Context, s *stage) ([]string, []int, error) { return shards(ctx, s, 4) },
		"citus":  citus,
	} {
		if !wants(cells, "shards/"+name+"/") {
			continue
		}
		urls, servers, err := open(ctx, s)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		var pools []*pgxpool.Pool
		var each []acquirer
		for _, url := range urls {
			pool, err := s.pool(ctx, url, false, int32(connections/len(urls)))
			if err != nil {
				return nil, err
			}
			pools, each = append(pools, pool), append(each, pgratelimit(client.New(pool)))
		}
		plain := func(ctx context.Context, key string) error {
			return each[client.ShardOf(key, len(each))](ctx, key)
		}
		combined := pgratelimit(s.combiner(pools[0]))
		if len(pools) > 1 {
			sharded, err := client.NewSharded(ctx, pools)
			if err != nil {
				return nil, err
			}
			s.atEnd(func() error { sharded.Close(); return nil })
			combined = pgratelimit(sharded)
		}
		all["shards/"+name+"/plain"] = opponent{acquire: plain, server: servers}
		all["shards/"+name+"/combined"] = opponent{acquire: combined, server: servers}
	}
	return loads(ctx, s.window, cells, all)
}

// shards makes databases on one server, with the policies, and returns their connection strings and the server's process.
func shards(ctx context.Context, s *stage, number int) (urls []string, servers []int, err error) {
	for n := range number {
		database, setUp := fmt.Sprintf("shards_%d_%d", number, n), definePolicies()
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
func citus(ctx context.Context, s *stage) ([]string, []int, error) {
	const name = "shards_citus"
	var coordinator *postgres
	var servers []int
	for n := range 3 {
		node, err := startPostgres(ctx, "shared_preload_libraries=citus", "max_prepared_transactions=200")
		if err != nil {
			return nil, nil, fmt.Errorf("RATELIMIT_PG_BIN has to name a PostgreSQL that has Citus: %w", err)
		}
		s.atEnd(node.Close)
		servers = append(servers, node.pid)
		socket, err := node.socket("")
		if err != nil {
			return nil, nil, err
		}
		add := "citus_add_node"
		if n == 0 {
			coordinator, add = node, "citus_set_coordinator_host"
		}
		err = node.exec(ctx, "", "alter system set citus.local_hostname = '"+socket+"'", "select pg_reload_conf()", "create database "+name+" template template0",
			"alter database "+name+" set synchronous_commit = off")
		if err != nil {
			return nil, nil, err
		}
		if err := node.exec(ctx, name, "create extension citus"); err != nil {
			return nil, nil, err
		}
		if err := coordinator.exec(ctx, name, "select "+add+"('"+socket+"', 5432)"); err != nil {
			return nil, nil, err
		}
	}
	root, err := repository(ctx)
	if err != nil {
		return nil, nil, err
	}
	if out, err := exec.CommandContext(ctx, "make", "-C", root, "install-citus", "DATABASE_URL="+coordinator.URL(name)).CombinedOutput(); err != nil {
		return nil, nil, fmt.Errorf("make install-citus: %w\n%s", err, out)
	}
	return []string{coordinator.URL(name)}, servers, coordinator.exec(ctx, name, definePolicies()...)
}

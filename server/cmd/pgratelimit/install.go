package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/migrations"
)

func (p *program) install() *cobra.Command {
	var shards int
	c := &cobra.Command{
		Use:   "install",
		Short: "Install into a database, or bring it up to date",
		Long: `Install into a database, or bring it up to date.

Of SHARD_URLS, each database is told which shard it is. With --shards, databases that do not
exist yet are created for them beside the one of DATABASE_URL, whose name they extend, and the
value for SHARD_URLS is printed.`,
	}
	c.Flags().IntVar(&shards, "shards", 0, "create so many shards, a power of two")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if shards != 0 {
			return p.installShards(c, shards)
		}
		return p.installAll(c)
	}
	return c
}

func (p *program) installAll(c *cobra.Command) error {
	return p.onEach(c, p.open, nil, func(db database) error {
		if err := migrations.Up(c.Context(), db.Conn); err != nil {
			return err
		}
		var installed struct {
			Release       string `json:"release"`
			Schema        string `json:"schema"`
			SchemaVersion int32  `json:"schema_version"`
		}
		// Read from the source of the function: a role that had nothing to install may not be allowed to call it.
		err := db.QueryRow(c.Context(), `
			select coalesce(max(substring(p.prosrc from '''([^'']+)''')), '?'),
			       coalesce(string_agg(p.pronamespace::pg_catalog.regnamespace::text, ', '), 'none (the functions are missing)'),
			       (select v.version from `+migrations.VersionTable+` as v)
			  from pg_catalog.pg_proc as p
			  join pg_catalog.pg_namespace as n on n.nspowner = p.proowner
			 where n.nspname = 'ratelimit' and p.proname = 'ratelimit_version' and p.pronargs = 0`,
		).Scan(&installed.Release, &installed.Schema, &installed.SchemaVersion)
		if err != nil {
			return err
		}
		if db.of > 0 {
			if _, err := db.Exec(c.Context(), "select ratelimit_define_shard($1::integer, $2::integer)", db.shard, db.of); err != nil {
				return described(err)
			}
		}
		return p.printOf(c, db, installed, fmt.Sprintf("pgratelimit %s is installed in schema %s; its schema version is %d.",
			installed.Release, installed.Schema, installed.SchemaVersion))
	})
}

func (p *program) uninstall() *cobra.Command {
	return &cobra.Command{
		Use:   "uninstall",
		Short: "Remove it from a database, with all policies and buckets",
		RunE: func(c *cobra.Command, _ []string) error {
			return p.onEach(c, p.open, nil, func(db database) error {
				if err := migrations.Down(c.Context(), db.Conn); err != nil {
					return err
				}
				return p.printOf(c, db, struct{}{}, "pgratelimit is removed.")
			})
		},
	}
}

// printOf prints the result for one database. With --json each database has a line.
func (p *program) printOf(c *cobra.Command, db database, value any, text string) error {
	if db.of > 0 {
		text = db.String() + ": " + text
	}
	return p.print(c, value, text)
}

// installShards creates the databases of shards, and installs into each.
func (p *program) installShards(c *cobra.Command, shards int) error {
	if shards < 1 || shards&(shards-1) != 0 {
		return usageError{fmt.Errorf("--shards %d is no power of two", shards)}
	}
	databases, err := p.databases()
	if err != nil {
		return err
	}
	base, err := url.Parse(databases.URLs[0])
	if err != nil || !strings.HasPrefix(base.Scheme, "postgres") || databases.AreShards {
		return usageError{errors.New("--shards takes a DATABASE_URL of the form postgres://host/name, and no SHARD_URLS")}
	}
	conn, err := connect(c.Context(), databases.URLs[0], c.ErrOrStderr())
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(c.Context()))
	urls := make([]string, shards)
	for n := range urls {
		name := fmt.Sprintf("%s_%d", conn.Config().Database, n)
		shard := *base
		shard.Path = "/" + name
		urls[n] = shard.String()
		var exists bool
		if err := conn.QueryRow(c.Context(), "select exists (select from pg_catalog.pg_database where datname = $1)", name).Scan(&exists); err != nil {
			return err
		}
		if !exists {
			if _, err := conn.Exec(c.Context(), "create database "+pgx.Identifier{name}.Sanitize()); err != nil {
				return described(err)
			}
		}
	}
	list := strings.Join(urls, " ")
	ofShards := *p
	ofShards.databaseURL, ofShards.shardURLs = "", list
	if err := ofShards.installAll(c); err != nil {
		return err
	}
	return p.print(c, map[string]string{"shard_urls": list}, `SHARD_URLS="`+list+`"`)
}

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/server/internal/inspect"
	"github.com/pgratelimit/pgratelimit/server/internal/jsonapi"
	"github.com/pgratelimit/pgratelimit/server/policyfile"
)

func (p *program) acquire() *cobra.Command {
	var cost int64
	var idempotencyKey string
	c := &cobra.Command{Use: "acquire POLICY KEY", Short: "Take tokens from a bucket if it holds enough"}
	c.Flags().Int64Var(&cost, "cost", 1, "whole tokens, 0 or more")
	c.Flags().StringVar(&idempotencyKey, "idempotency-key", "", "charge a repeat under the same key nothing")
	c.RunE = p.onShardOf(func(c *cobra.Command, conn *pgx.Conn, args []string) error {
		opts := []client.CallOption{client.Cost(cost)}
		if c.Flags().Changed("idempotency-key") {
			opts = append(opts, client.IdempotencyKey(idempotencyKey))
		}
		return p.decided(c)(client.New(conn).Acquire(c.Context(), args[0], args[1], opts...))
	})
	return c
}

func (p *program) peek() *cobra.Command {
	var cost int64
	c := &cobra.Command{Use: "peek POLICY KEY", Short: "Say what acquire would answer, and take nothing"}
	c.Flags().Int64Var(&cost, "cost", 1, "whole tokens, 0 or more")
	c.RunE = p.onShardOf(func(c *cobra.Command, conn *pgx.Conn, args []string) error {
		return p.decided(c)(client.New(conn).Peek(c.Context(), args[0], args[1], client.Cost(cost)))
	})
	return c
}

// decided prints a decision. A denial ends with exit code 2.
func (p *program) decided(c *cobra.Command) func(client.Decision, error) error {
	return func(d client.Decision, err error) error {
		if err != nil {
			return err
		}
		return p.answer(c, jsonapi.NewDecision(d), inWords(d), d.Allowed)
	}
}

// answer prints the answer to a question, and ends with exit code 2 unless it is yes.
func (p *program) answer(c *cobra.Command, value any, text string, yes bool) error {
	if err := p.print(c, value, text); err != nil || yes {
		return err
	}
	return answerNo{}
}

func inWords(d client.Decision) string {
	left := fmt.Sprintf("%d of %d tokens left", d.Remaining, d.Capacity)
	switch {
	case d.Never():
		return "denied: " + left + ", and no wait would help"
	case !d.Allowed:
		return fmt.Sprintf("denied: %s, enough in %v", left, d.RetryAfter)
	case d.Replayed:
		left += " (replayed: nothing was taken)"
	case d.Shadowed:
		left += " (shadowed: enforcing would deny)"
	case d.NeverFull():
		left += ", does not refill"
	case d.ResetAfter > 0:
		left += fmt.Sprintf(", full in %v", d.ResetAfter)
	}
	return "allowed: " + left
}

func tableOf(rows []inspect.Row, none string) string {
	if len(rows) == 0 {
		return none
	}
	return columns(func(table io.Writer) {
		for i, row := range rows {
			var names, cells []string
			for _, c := range row {
				cell := fmt.Sprint(c.Value)
				switch value := c.Value.(type) {
				case nil:
					cell = "never"
				case string:
					cell = inspect.Printable(value)
				case *jsonapi.Seconds:
					cell = time.Duration(*value).String()
				}
				names, cells = append(names, strings.ToUpper(c.Name)), append(cells, cell)
			}
			if i == 0 {
				fmt.Fprintln(table, strings.Join(names, "\t"))
			}
			fmt.Fprintln(table, strings.Join(cells, "\t"))
		}
	})
}

// listing lists the rows of a statement from all shards. Its arguments are the policy and the key, each perhaps null, the flag for the
// number of rows, and the values of more flags.
func (p *program) listing(c *cobra.Command, most int32, sql, none string, order func(a, b inspect.Row) int, flags ...func() any) *cobra.Command {
	var maxRows int32
	c.Flags().Int32Var(&maxRows, "max-rows", most, "how many to list")
	c.RunE = func(c *cobra.Command, args []string) error {
		asked := make([]*string, 2)
		for i := range args {
			asked[i] = &args[i]
		}
		values := []any{asked[0], asked[1], maxRows}
		for _, flag := range flags {
			values = append(values, flag())
		}
		all, err := askAll(p, c, asked[1], func(db database) ([]inspect.Row, error) { return inspect.Rows(c.Context(), db.Conn, sql, values...) })
		if err != nil {
			return err
		}
		slices.SortStableFunc(all, order) // those of several shards
		all = all[:min(len(all), int(maxRows))]
		return p.print(c, all, tableOf(all, none))
	}
	return c
}

// byTexts orders rows by two columns that follow each other.
func byTexts(first int) func(a, b inspect.Row) int {
	textOf := func(r inspect.Row) string { return fmt.Sprintf("%q %q", r[first].Value, r[first+1].Value) }
	return func(a, b inspect.Row) int { return strings.Compare(textOf(a), textOf(b)) }
}

func (p *program) status() *cobra.Command {
	share := func(r inspect.Row) float64 { return float64(r[2].Value.(int64)) / float64(max(1, r[5].Value.(int64))) } // remaining of capacity
	return p.listing(&cobra.Command{Use: "status [POLICY]", Short: "List the emptiest buckets; reads every bucket"}, 100,
		"select * from ratelimit_status(policy => $1::text, key => $2::text, max_rows => $3::integer)", "Every bucket is full.",
		func(a, b inspect.Row) int { return cmp.Compare(share(a), share(b)) })
}

func (p *program) holders() *cobra.Command {
	return p.listing(&cobra.Command{Use: "holders [POLICY] [KEY]", Short: "List who holds slots, and how long each lease lasts"}, 1000,
		"select * from ratelimit_holders(policy => $1::text, key => $2::text, max_rows => $3::integer)", "Nobody holds slots.", byTexts(0))
}

func (p *program) grants() *cobra.Command {
	var settled, unsettled bool
	c := &cobra.Command{Use: "grants POLICY [KEY]", Short: "List the live grants of idempotency keys, the oldest first"}
	c.Flags().BoolVar(&settled, "settled", false, "only those that are settled")
	c.Flags().BoolVar(&unsettled, "unsettled", false, "only those that are not")
	c.MarkFlagsMutuallyExclusive("settled", "unsettled")
	expiresIn := func(r inspect.Row) jsonapi.Seconds { return *r[len(r)-1].Value.(*jsonapi.Seconds) }
	return p.listing(c, 1000, "select * from ratelimit_grants(policy => $1::text, key => $2::text, max_rows => $3::integer, settled => $4::boolean)",
		"No idempotency key is live.", func(a, b inspect.Row) int { return cmp.Compare(expiresIn(a), expiresIn(b)) },
		func() any {
			if settled || unsettled {
				return settled
			}
			return nil
		})
}

func (p *program) usage() *cobra.Command {
	var since, until string
	c := &cobra.Command{Use: "usage POLICY [KEY]", Short: "List what the keys of a quota have used in its periods"}
	c.Flags().StringVar(&since, "since", "", "list periods that end after this, such as 2026-10-01T00:00:00Z")
	c.Flags().StringVar(&until, "until", "", "list periods that begin before this")
	return p.listing(c, 1000, "select * from ratelimit_usage(policy => $1::text, key => $2::text, max_rows => $3::integer,"+
		" since => nullif($4::text, '')::timestamptz, until => nullif($5::text, '')::timestamptz)",
		"Nothing was used.", byTexts(1), func() any { return since }, func() any { return until })
}

func (p *program) doctor() *cobra.Command {
	c := &cobra.Command{Use: "doctor", Short: "Say what makes limits slow or tables large, and what helps"}
	c.RunE = func(c *cobra.Command, _ []string) error {
		findings, err := askAll(p, c, nil, func(db database) ([]inspect.Finding, error) {
			return inspect.Findings(c.Context(), db.Conn, db.String())
		})
		if err != nil {
			return err
		}
		lines := make([]string, len(findings))
		for i, f := range findings {
			lines[i] = fmt.Sprintf("%s: %s\n  %s", f.Severity, f.Finding, f.Remedy)
		}
		return p.answer(c, findings, cmp.Or(strings.Join(lines, "\n"), "All is well."), len(findings) == 0)
	}
	return c
}

func (p *program) policies() *cobra.Command {
	c := &cobra.Command{Use: "policies", Short: "List the policies"}
	c.RunE = func(c *cobra.Command, _ []string) error {
		rows, err := askAll(p, c, nil, func(db database) ([]policyfile.Policy, error) { return policyfile.ReadPolicies(c.Context(), db.Conn) })
		if err != nil {
			return err
		}
		slices.SortStableFunc(rows, func(a, b policyfile.Policy) int { return cmp.Compare(a.Name, b.Name) })
		rows = slices.CompactFunc(rows, policyfile.Policy.IsAs) // shards have the same ones
		table := make([]inspect.Row, len(rows))
		for i, r := range rows {
			table[i] = inspect.Row{{Name: "policy", Value: r.Name}}
			for _, field := range strings.Fields("capacity refill every stepped durable remember shadow period time_zone anchor lease") {
				table[i] = append(table[i], inspect.Column{Name: field, Value: cmp.Or[any](r.Values[field], "-")})
			}
		}
		return p.print(c, rows, tableOf(table, "There is no policy yet."))
	}
	return c
}

func (p *program) export() *cobra.Command {
	return &cobra.Command{
		Use:   "export",
		Short: "Write the policies and overrides of a database as a policy file",
		Long:  "Write the policies and overrides of a database as a policy file, which apply finds to be as the database is.",
		RunE: func(c *cobra.Command, _ []string) error {
			dbs, err := p.connect(c.Context(), c.ErrOrStderr(), nil)
			if err != nil {
				return err
			}
			defer closeAll(c.Context(), dbs)
			from := make([]policyfile.Database, len(dbs))
			for i := range dbs {
				from[i] = dbs[i].Conn
			}
			text, err := policyfile.Export(c.Context(), from...)
			if err != nil {
				return err
			}
			return p.print(c, map[string]string{"file": string(text)}, strings.TrimRight(string(text), "\n"))
		},
	}
}

func (p *program) reset() *cobra.Command {
	var all bool
	c := &cobra.Command{Use: "reset POLICY [KEY]", Short: "Make a bucket full, or with --all every bucket of a policy"}
	c.Flags().BoolVar(&all, "all", false, "every bucket of the policy, in batches that commit")
	c.RunE = func(c *cobra.Command, args []string) error {
		switch {
		case all == (len(args) == 2):
			return usageError{errors.New("which buckets? Write the KEY of one, or --all")}
		case all:
			if err := p.onEach(c, p.connect, nil, func(db database) error { return client.New(db.Conn).ResetAll(c.Context(), args[0]) }); err != nil {
				return err
			}
			return p.print(c, struct{}{}, fmt.Sprintf("all buckets of %q are full", args[0]))
		}
		return p.onShardOf(func(c *cobra.Command, conn *pgx.Conn, args []string) error {
			if err := client.New(conn).Reset(c.Context(), args[0], args[1]); err != nil {
				return err
			}
			return p.print(c, struct{}{}, fmt.Sprintf("bucket %q of %q is full", args[1], args[0]))
		})(c, args)
	}
	return c
}

func (p *program) override() *cobra.Command {
	var capacity, refill int64
	var every, expiresAt, timeZone, anchor, lease string
	var remove bool
	c := &cobra.Command{
		Use:   "override POLICY KEY",
		Short: "Give one key of a policy numbers of its own, or with --remove the policy's again",
		Long: `Give one key of a policy numbers of its own, and print what the key then has: numbers that stay, and with
--expires-at numbers that end, on top. What is left out remains as it was, and what was never set is the policy's.
--capacity 0 blocks the key. --expires-at alone moves the end of what ends. --remove removes all.`,
	}
	flags := c.Flags()
	flags.Int64Var(&capacity, "capacity", 0, "whole tokens, 0 or more")
	flags.Int64Var(&refill, "refill", 0, "whole tokens, 0 or more")
	flags.StringVar(&every, "every", "", "the interval of refill, such as 10s or 1h30m")
	flags.StringVar(&expiresAt, "expires-at", "", "when it ends, such as 2031-01-01T00:00:00Z")
	flags.StringVar(&timeZone, "time-zone", "", "of a quota, such as Europe/Berlin")
	flags.StringVar(&anchor, "anchor", "", "one turn of a quota, such as 2024-01-31 or 2024-01-31T09:00:00")
	flags.StringVar(&lease, "lease", "", "of slots, such as 5m: how long a holder has them unless it renews")
	flags.BoolVar(&remove, "remove", false, "leave the key to the policy's numbers")
	set := func(c *cobra.Command, conn *pgx.Conn, args []string) error {
		given := func(name string, value any) any {
			if !flags.Changed(name) {
				return nil
			}
			return value
		}
		parts, err := policyfile.ReadOverrides(c.Context(), conn,
			"ratelimit_override($1::text, $2::text, $3::bigint, $4::bigint, $5::text::interval, $6::text::timestamptz, $7::text, $8::text::timestamp, $9::text::interval)",
			args[0], args[1], given("capacity", capacity), given("refill", refill), given("every", every), given("expires-at", expiresAt),
			given("time-zone", timeZone), given("anchor", anchor), given("lease", lease))
		if err != nil {
			return inspect.Described(err)
		}
		lines := make([]string, len(parts))
		for i := range parts {
			lines[i] = parts[i].String()
		}
		return p.print(c, parts, strings.Join(lines, "\n"))
	}
	removeIt := func(c *cobra.Command, conn *pgx.Conn, args []string) error {
		removed, err := client.New(conn).RemoveOverride(c.Context(), args[0], args[1])
		if err != nil {
			return err
		}
		text := fmt.Sprintf("override %q of %q is removed", args[1], args[0])
		if !removed {
			text = fmt.Sprintf("there was no override %q of %q", args[1], args[0])
		}
		return p.print(c, map[string]bool{"removed": removed}, text)
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		hasNumbers := slices.ContainsFunc([]string{"capacity", "refill", "every", "time-zone", "anchor", "lease"}, flags.Changed)
		switch {
		case remove && (hasNumbers || flags.Changed("expires-at")):
			return usageError{errors.New("--remove takes no numbers: leave them out, or leave out --remove")}
		case remove:
			return p.onShardOf(removeIt)(c, args)
		case !hasNumbers && !flags.Changed("expires-at"):
			return usageError{errors.New("which numbers? Write --capacity, --refill, --every, --time-zone, --anchor or --lease, or --expires-at alone, or --remove")}
		}
		return p.onShardOf(set)(c, args)
	}
	return c
}

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
				return inspect.Described(err)
			}
		}
		return p.print(c, installed, fmt.Sprintf("%spgratelimit %s is installed in schema %s; its schema version is %d.",
			db.prefix(), installed.Release, installed.Schema, installed.SchemaVersion))
	})
}

func (p *program) uninstall() *cobra.Command {
	c := &cobra.Command{Use: "uninstall", Short: "Remove it from a database, with all policies and buckets"}
	c.RunE = func(c *cobra.Command, _ []string) error {
		return p.onEach(c, p.open, nil, func(db database) error {
			if err := migrations.Down(c.Context(), db.Conn); err != nil {
				return err
			}
			return p.print(c, struct{}{}, db.prefix()+"pgratelimit is removed.")
		})
	}
	return c
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
				return inspect.Described(err)
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

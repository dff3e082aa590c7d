package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/inspect"
	"github.com/pgratelimit/pgratelimit/server/policyfile"
)

func (p *program) policies() *cobra.Command {
	return &cobra.Command{
		Use:   "policies",
		Short: "List the policies",
		RunE: func(c *cobra.Command, _ []string) error {
			rows, err := askAll(p, c, func(db database) ([]policyfile.Policy, error) { return policyfile.ReadPolicies(c.Context(), db.Conn) })
			if err != nil {
				return err
			}
			slices.SortStableFunc(rows, func(a, b policyfile.Policy) int { return cmp.Compare(a.Name, b.Name) })
			rows = slices.Compact(rows) // shards have the same ones
			if len(rows) == 0 {
				return p.print(c, rows, "There is no policy yet.")
			}
			return p.print(c, rows, columns(func(table io.Writer) {
				fmt.Fprintln(table, "POLICY\tCAPACITY\tREFILL\tEVERY\tSTEPPED\tDURABLE\tREMEMBER\tSHADOW\tPERIOD\tTIME_ZONE\tANCHOR\tLEASE")
				for _, r := range rows {
					gains, remember, calendar, lease := fmt.Sprintf("%d\t%v\t%t", r.Refill, r.Every, r.Stepped), r.Remember.String(), "-\t-\t-", "-"
					switch {
					case r.Lease != 0:
						gains, remember, lease = calendar, "-", r.Lease.String()
					case r.Period != "":
						gains, calendar = calendar, r.Period+"\t"+r.TimeZone+"\t"+r.Anchor
					}
					fmt.Fprintf(table, "%s\t%d\t%s\t%t\t%s\t%t\t%s\t%s\n", inspect.Printable(r.Name), r.Capacity, gains, r.Durable, remember, r.Shadow, calendar, lease)
				}
			}))
		},
	}
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
		Long: `Give one key of a policy numbers of its own, in place of those that it had. What is left out is
the policy's, and without --expires-at it lasts. --capacity 0 blocks the key. A quota's key keeps the
--time-zone and --anchor that it had.`,
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
		_, err := conn.Exec(c.Context(), "select ratelimit_override($1::text, $2::text, $3::bigint, $4::bigint, $5::text::interval, $6::text::timestamptz, $7::text, $8::text::timestamp, $9::text::interval)",
			args[0], args[1], given("capacity", capacity), given("refill", refill), given("every", every), given("expires-at", expiresAt),
			given("time-zone", timeZone), given("anchor", anchor), given("lease", lease))
		if err != nil {
			return described(err)
		}
		return p.print(c, struct{}{}, fmt.Sprintf("override %q of %q is set", args[1], args[0]))
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
		case !hasNumbers:
			return usageError{errors.New("which numbers? Write --capacity, --refill, --every, --time-zone, --anchor or --lease, or --remove")}
		}
		return p.onShardOf(set)(c, args)
	}
	return c
}

package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/inspect"
	"github.com/pgratelimit/pgratelimit/server/internal/jsonapi"
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

func (p *program) status() *cobra.Command {
	var maxRows int32
	c := &cobra.Command{Use: "status [POLICY]", Short: "List the emptiest buckets; reads every bucket"}
	c.Flags().Int32Var(&maxRows, "max-rows", 100, "how many to list")
	c.RunE = func(c *cobra.Command, args []string) error {
		var policy *string
		if len(args) > 0 {
			policy = &args[0]
		}
		buckets, err := askAll(p, c, func(db database) ([]inspect.Bucket, error) {
			return inspect.Buckets(c.Context(), db.Conn, policy, nil, maxRows)
		})
		if err != nil {
			return err
		}
		slices.SortStableFunc(buckets, func(a, b inspect.Bucket) int { return cmp.Compare(a.Share(), b.Share()) }) // those of several shards
		buckets = buckets[:min(len(buckets), int(maxRows))]
		return p.print(c, buckets, tableOf(buckets))
	}
	return c
}

// tableOf has the columns that the database returns, which may be newer than this program.
func tableOf(buckets []inspect.Bucket) string {
	if len(buckets) == 0 {
		return "Every bucket is full."
	}
	return columns(func(table io.Writer) {
		for i, b := range buckets {
			names, cells := make([]string, len(b.Columns)), make([]string, len(b.Columns))
			for n, c := range b.Columns {
				names[n] = strings.ToUpper(c.Name)
				switch value := c.Value.(type) {
				case nil:
					cells[n] = "never"
				case string:
					cells[n] = inspect.Printable(value)
				case *jsonapi.Seconds:
					cells[n] = time.Duration(*value).String()
				default:
					cells[n] = fmt.Sprint(value)
				}
			}
			if i == 0 {
				fmt.Fprintln(table, strings.Join(names, "\t"))
			}
			fmt.Fprintln(table, strings.Join(cells, "\t"))
		}
	})
}

// A holder is a client.Holder in JSON.
type holder struct {
	Policy  string          `json:"policy"`
	Key     string          `json:"key"`
	Holder  string          `json:"holder"`
	Cost    int64           `json:"cost"`
	HeldFor jsonapi.Seconds `json:"held_for"`
}

func (p *program) holders() *cobra.Command {
	var maxRows int32
	c := &cobra.Command{Use: "holders [POLICY] [KEY]", Short: "List who holds slots, and how long each lease lasts"}
	c.Flags().Int32Var(&maxRows, "max-rows", 1000, "how many to list")
	c.RunE = func(c *cobra.Command, args []string) error {
		opts := []client.CallOption{client.MaxRows(maxRows)}
		var key *string
		if len(args) > 0 {
			opts = append(opts, client.OfPolicy(args[0]))
		}
		if len(args) > 1 {
			key = &args[1]
			opts = append(opts, client.OfKey(*key))
		}
		holders := []holder{}
		err := p.onEach(c, p.connect, key, func(db database) error {
			rows, err := client.New(db.Conn).Holders(c.Context(), opts...)
			for _, h := range rows {
				holders = append(holders, holder{h.Policy, h.Key, h.Holder, h.Cost, jsonapi.Seconds(h.HeldFor)})
			}
			return err
		})
		if err != nil {
			return err
		}
		slices.SortStableFunc(holders, func(a, b holder) int { // those of several shards
			return cmp.Or(cmp.Compare(a.Policy, b.Policy), cmp.Compare(a.Key, b.Key))
		})
		holders = holders[:min(len(holders), int(maxRows))]
		if len(holders) == 0 {
			return p.print(c, holders, "Nobody holds slots.")
		}
		return p.print(c, holders, columns(func(table io.Writer) {
			fmt.Fprintln(table, "POLICY\tKEY\tHOLDER\tCOST\tHELD FOR")
			for _, h := range holders {
				fmt.Fprintf(table, "%s\t%s\t%s\t%d\t%v\n", inspect.Printable(h.Policy), inspect.Printable(h.Key), inspect.Printable(h.Holder),
					h.Cost, time.Duration(h.HeldFor))
			}
		}))
	}
	return c
}

func (p *program) doctor() *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "Say what makes limits slow or tables large, and what helps",
		RunE: func(c *cobra.Command, _ []string) error {
			findings, err := askAll(p, c, func(db database) ([]inspect.Finding, error) {
				findings, err := inspect.Findings(c.Context(), db.Conn)
				for i := range findings {
					if db.of > 0 {
						findings[i].Finding = db.String() + ": " + findings[i].Finding
					}
				}
				return findings, err
			})
			if err != nil {
				return err
			}
			lines := make([]string, len(findings))
			for i, f := range findings {
				lines[i] = fmt.Sprintf("%s: %s\n  %s", f.Severity, f.Finding, f.Remedy)
			}
			return p.answer(c, findings, cmp.Or(strings.Join(lines, "\n"), "All is well."), len(findings) == 0)
		},
	}
}

package main

import (
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/server/internal/jsonapi"
)

// A bucket is a row of ratelimit_status.
type bucket struct {
	Policy     string           `json:"policy"`
	Key        string           `json:"key"`
	Remaining  int64            `json:"remaining"`
	RetryAfter *jsonapi.Seconds `json:"retry_after"`
	ResetAfter *jsonapi.Seconds `json:"reset_after"`
	Capacity   int64            `json:"capacity"`
	Overridden bool             `json:"overridden"`
}

func (p *program) status() *cobra.Command {
	var maxRows int32
	c := &cobra.Command{
		Use:   "status [POLICY]",
		Short: "List the emptiest buckets; reads every bucket",
		Args:  atMost(1),
	}
	c.Flags().Int32Var(&maxRows, "max-rows", 100, "how many to list")
	c.RunE = p.onDatabase(func(c *cobra.Command, conn *pgx.Conn, args []string) error {
		var policy *string
		if len(args) > 0 {
			policy = &args[0]
		}
		rows, _ := conn.Query(c.Context(), `
			select policy, key, remaining,
			       (extract(epoch from retry_after) * 1000000.0)::bigint,
			       (extract(epoch from reset_after) * 1000000.0)::bigint,
			       capacity, overridden
			  from ratelimit_status($1::text, $2::integer)`, policy, maxRows)
		buckets, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (b bucket, err error) {
			var retryAfter, resetAfter *int64
			err = row.Scan(&b.Policy, &b.Key, &b.Remaining, &retryAfter, &resetAfter, &b.Capacity, &b.Overridden)
			b.RetryAfter, b.ResetAfter = seconds(retryAfter), seconds(resetAfter)
			return b, err
		})
		if err != nil {
			return described(err)
		}
		return p.print(c, buckets, tableOf(buckets))
	})
	return c
}

// seconds converts microseconds, of which null is never.
func seconds(micros *int64) *jsonapi.Seconds {
	if micros == nil {
		return nil
	}
	s := jsonapi.Seconds(time.Duration(min(*micros, time.Duration(1<<63-1).Microseconds())) * time.Microsecond)
	return &s
}

func tableOf(buckets []bucket) string {
	if len(buckets) == 0 {
		return "Every bucket is full."
	}
	var text strings.Builder
	table := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "POLICY\tKEY\tREMAINING\tCAPACITY\tNEXT TOKEN IN\tFULL IN\tOVERRIDDEN")
	never := func(s *jsonapi.Seconds) string {
		if s == nil {
			return "never"
		}
		return time.Duration(*s).String()
	}
	for _, b := range buckets {
		overridden := "no"
		if b.Overridden {
			overridden = "yes"
		}
		fmt.Fprintf(table, "%s\t%s\t%d\t%d\t%s\t%s\t%s\n", printable(b.Policy), printable(b.Key), b.Remaining, b.Capacity,
			never(b.RetryAfter), never(b.ResetAfter), overridden)
	}
	table.Flush()
	return strings.TrimRight(text.String(), "\n")
}

// printable keeps what callers chose from moving the cursor of whoever reads it.
func printable(name string) string {
	quoted := fmt.Sprintf("%q", name)
	if quoted[1:len(quoted)-1] == name {
		return name
	}
	return quoted
}

// A finding is a row of ratelimit_doctor.
type finding struct {
	Severity string `json:"severity"`
	Finding  string `json:"finding"`
	Remedy   string `json:"remedy"`
}

func (p *program) doctor() *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "Say what makes limits slow or tables large, and what helps",
		Args:  exactly(0),
		RunE: p.onDatabase(func(c *cobra.Command, conn *pgx.Conn, _ []string) error {
			rows, _ := conn.Query(c.Context(), "select severity, finding, remedy from ratelimit_doctor()")
			findings, err := pgx.CollectRows(rows, pgx.RowToStructByPos[finding])
			if err != nil {
				return described(err)
			}
			text := "All is well."
			if len(findings) > 0 {
				var lines []string
				for _, f := range findings {
					lines = append(lines, fmt.Sprintf("%s: %s\n  %s", f.Severity, f.Finding, f.Remedy))
				}
				text = strings.Join(lines, "\n")
			}
			if err := p.print(c, findings, text); err != nil {
				return err
			}
			if len(findings) > 0 {
				return answerNo{}
			}
			return nil
		}),
	}
}

package main

import (
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/jsonapi"
)

func (p *program) acquire() *cobra.Command {
	var cost int64
	var idempotencyKey string
	c := &cobra.Command{
		Use:   "acquire POLICY KEY",
		Short: "Take tokens from a bucket if it holds enough",
		Args:  exactly(2),
	}
	c.Flags().Int64Var(&cost, "cost", 1, "whole tokens, 0 or more")
	c.Flags().StringVar(&idempotencyKey, "idempotency-key", "", "charge a repeat under the same key nothing")
	c.RunE = p.onShardOf(func(c *cobra.Command, conn *pgx.Conn, args []string) error {
		opts := []client.AcquireOption{client.Cost(cost)}
		if c.Flags().Changed("idempotency-key") {
			opts = append(opts, client.IdempotencyKey(idempotencyKey))
		}
		return p.decided(c)(client.New(conn).Acquire(c.Context(), args[0], args[1], opts...))
	})
	return c
}

func (p *program) peek() *cobra.Command {
	var cost int64
	c := &cobra.Command{
		Use:   "peek POLICY KEY",
		Short: "Say what acquire would answer, and take nothing",
		Args:  exactly(2),
	}
	c.Flags().Int64Var(&cost, "cost", 1, "whole tokens, 0 or more")
	c.RunE = p.onShardOf(func(c *cobra.Command, conn *pgx.Conn, args []string) error {
		return p.decided(c)(client.New(conn).Peek(c.Context(), args[0], args[1], client.Cost(cost)))
	})
	return c
}

// decided prints a decision, of which a denial is a no.
func (p *program) decided(c *cobra.Command) func(client.Decision, error) error {
	return func(d client.Decision, err error) error {
		if err != nil {
			return err
		}
		if err := p.print(c, jsonapi.NewDecision(d), inWords(d)); err != nil {
			return err
		}
		if !d.Allowed {
			return answerNo{}
		}
		return nil
	}
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
